#include "few_bits.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace verkv::lab {

namespace {

constexpr std::int64_t kMostCoordinates = 128;
constexpr double kEndsBits = 32;  // of a group, both

// Numbers data[0], data[stride], ..., data[(count - 1) * stride] as a group.
void round_group(Half* data, std::int64_t stride, std::int64_t count, int bits) {
  float least = to_float(data[0]);
  float most = least;
  for (std::int64_t i = 1; i < count; ++i) {
    least = std::min(least, to_float(data[i * stride]));
    most = std::max(most, to_float(data[i * stride]));
  }
  const float levels = static_cast<float>((1 << bits) - 1);
  const float step = (most - least) / levels;
  if (!(step > 0)) return;
  for (std::int64_t i = 0; i < count; ++i) {
    const float level = std::round((to_float(data[i * stride]) - least) / step);
    data[i * stride] = to_half(least + level * step);
  }
}

std::int64_t whole(std::int64_t tokens) { return tokens / kFewBitsTokens * kFewBitsTokens; }

}  // namespace

void round_keys(std::span<Half> keys, std::int64_t channels, int bits) {
  const std::int64_t tokens = whole(static_cast<std::int64_t>(keys.size()) / channels);
  for (std::int64_t t = 0; t < tokens; t += kFewBitsTokens) {
    for (std::int64_t j = 0; j < channels; ++j)
      round_group(keys.data() + t * channels + j, channels, kFewBitsTokens, bits);
  }
}

void round_values(std::span<Half> values, std::int64_t kv_heads, std::int64_t dim, int bits) {
  const std::int64_t tokens = whole(static_cast<std::int64_t>(values.size()) / (kv_heads * dim));
  for (std::int64_t row = 0; row < tokens * kv_heads; ++row) {
    for (std::int64_t j = 0; j < dim; j += kMostCoordinates)
      round_group(values.data() + row * dim + j, 1, std::min(kMostCoordinates, dim - j), bits);
  }
}

double few_bits_share(std::int64_t key_dim, std::int64_t value_dim, std::int64_t prompt_tokens,
                      std::int64_t tokens, int bits) {
  const double key = static_cast<double>(key_dim);
  const double value = static_cast<double>(value_dim);
  const double groups = std::ceil(value / static_cast<double>(kMostCoordinates)) +
                        key / static_cast<double>(kFewBitsTokens);
  const double row = bits * (key + value) + kEndsBits * groups;
  const double rounded = static_cast<double>(whole(prompt_tokens)) / static_cast<double>(tokens);
  return rounded * row / (16 * (key + value)) + (1 - rounded);
}

}  // namespace verkv::lab
