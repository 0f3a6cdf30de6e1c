// What a backend gives to calibrate_sketch: the stored keys of a head, its odds and importance, and
// the prompt's queries of its group.
#ifndef VERKV_SRC_CPU_CALIBRATION_HPP
#define VERKV_SRC_CPU_CALIBRATION_HPP

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <verkv/error.hpp>
#include <verkv/view.hpp>

#include "cpu/kernels.hpp"
#include "sketch_basis.hpp"

namespace verkv::cpu {

// The mean of each channel over the first `count` rows: sums in double, in order.
inline void channel_means_of(const Rows& keys, std::int64_t count, std::span<float> out_mean) {
  for (std::size_t j = 0; j < out_mean.size(); ++j) {
    double sum = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      sum += static_cast<double>(load_element(keys, i, static_cast<std::int64_t>(j)));
    }
    out_mean[j] = static_cast<float>(sum / static_cast<double>(count));
  }
}

// Positions [0, odds.size()). importance: of the same positions, or null.
class StoredTokens final : public CalibrationTokens {
 public:
  StoredTokens(const Rows& keys, std::span<const Positive16> odds, const float* importance)
      : keys_(keys), odds_(odds), importance_(importance) {
    key_dim = keys.dim;
    count = static_cast<std::int64_t>(odds.size());
    mean_.resize(static_cast<std::size_t>(key_dim));
    channel_means_of(keys_, count, mean_);
  }
  void centred_key(std::int64_t token, std::span<float> out_key) const override {
    for (std::size_t j = 0; j < out_key.size(); ++j)
      out_key[j] = load_element(keys_, token, static_cast<std::int64_t>(j)) - mean_[j];
  }
  double weight(std::int64_t token) const override {
    const bool low = odds_[static_cast<std::size_t>(token)].bits < kPositive16Infinity.bits;
    return low && importance_ != nullptr ? static_cast<double>(importance_[token]) : 0.0;
  }

 private:
  Rows keys_;
  std::span<const Positive16> odds_;
  const float* importance_;
  std::vector<float> mean_;
};

// Query heads [first_head, first_head + group) of a view that the host reads, [position and
// head][dim]. Throws InvalidArgument, naming layer, position, head and coordinate, on a number that
// is not finite.
inline std::vector<float> gather_queries(const TensorView& view, std::int64_t layer,
                                         std::int64_t first_head, std::int64_t group) {
  std::vector<float> result;
  result.reserve(static_cast<std::size_t>(view.tokens * group * view.dim));
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    for (std::int64_t head = first_head; head < first_head + group; ++head) {
      const Rows row{view.row(t, head), view.type, 0, static_cast<int>(view.dim)};
      for (std::int64_t j = 0; j < view.dim; ++j) {
        const float x = load_element(row, 0, j);
        if (!std::isfinite(x)) {
          throw InvalidArgument("prompt query of layer " + std::to_string(layer) + ", position " +
                                std::to_string(t) + ", head " + std::to_string(head) +
                                ", coordinate " + std::to_string(j) + " is " + std::to_string(x) +
                                "; it must be finite");
        }
        result.push_back(x);
      }
    }
  }
  return result;
}

}  // namespace verkv::cpu

#endif  // VERKV_SRC_CPU_CALIBRATION_HPP
