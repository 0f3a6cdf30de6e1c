// Outputs are written: numbers that may not change cannot take them.
// Expected: no match for|no viable overloaded
#include <vector>
#include <verkv/verkv.hpp>

void use(verkv::AttendBatch& batch, std::vector<float>& numbers) {
  const std::vector<float>& fixed = numbers;
  static_cast<void>(fixed);
#ifdef VERKV_MISUSE
  batch.output = fixed;
#else
  batch.output = numbers;
#endif
}
