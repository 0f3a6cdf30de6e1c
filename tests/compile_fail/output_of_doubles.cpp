// Outputs are binary32.
// Expected: no match for|no viable overloaded
#include <vector>
#include <verkv/verkv.hpp>

void use(verkv::AttendBatch& batch, std::vector<float>& singles, std::vector<double>& doubles) {
  static_cast<void>(doubles);
  static_cast<void>(singles);
#ifdef VERKV_MISUSE
  batch.output = doubles;
#else
  batch.output = singles;
#endif
}
