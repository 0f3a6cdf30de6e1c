// What stands for the model: random matrices, attention through VERKV. Every number of a row rests on
// its token, its position and the tokens before it, and on nothing else in the batch.
#ifndef VERKV_SERVING_LOOP_TOY_MODEL_HPP
#define VERKV_SERVING_LOOP_TOY_MODEL_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <verkv/importance.hpp>
#include <verkv/kv_cache_manager.hpp>

using Floats = std::vector<float>;
inline constexpr int kLayers = 2, kKvHeads = 2, kHeads = 4, kDim = 32;
inline constexpr int kWidth = 32, kVocabulary = 64;
inline constexpr std::size_t kQuery = kHeads * kDim, kKey = kKvHeads * kDim;  // floats a row

// A random number that these three name, in [0, 1).
inline float chance(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t x = ((a * 0x9E3779B97F4A7C15 + b) * 0xD1342543DE82EF95 + c) * 0xAF251AF3B0F025B5;
  x = (x ^ x >> 32) * 0x9E3779B97F4A7C15;
  return static_cast<float>(x >> 40) * 0x1p-24f;
}

// A token of a sequence, which the cache has next.
struct Row {
  verkv::SequenceId sequence;
  int token, position;
};

// What a pass leaves, row by row; queries [row][query head][kDim] and scores [row][KV head] by layer.
struct Pass {
  Floats hidden;
  std::array<Floats, kLayers> queries, scores;
};

class ToyModel {
 public:
  ToyModel() {
    for (Layer& layer : layers_)
      layer = {noise(kWidth * kQuery), noise(kWidth * kKey), noise(kWidth * kKey),
               noise(kQuery * kWidth)};
  }

  // Adds the rows to the cache and attends, layer by layer: any mix of prompts, steps and drafts.
  Pass run(verkv::KvCacheManager& cache, std::span<const Row> rows) const {
    Pass pass;
    std::vector<verkv::SequenceId> sequences;
    for (const Row& row : rows) {
      sequences.push_back(row.sequence);
      for (std::size_t i = 0; i < kWidth; ++i)
        pass.hidden.push_back(
            embedding(row.token, i) +
            std::sin(0.1f * static_cast<float>(row.position) * static_cast<float>(i + 1) / kWidth));
    }
    Floats output(rows.size() * kQuery);
    for (std::size_t l = 0; l < kLayers; ++l) {
      const Floats keys = product(pass.hidden, layers_[l].key, kKey);
      const Floats values = product(pass.hidden, layers_[l].value, kKey);
      pass.queries[l] = product(pass.hidden, layers_[l].query, kQuery);
      cache.step(
          static_cast<int>(l), view(keys, kKvHeads), view(values, kKvHeads),
          {.sequences = sequences, .queries = view(pass.queries[l], kHeads), .output = output});
      const Floats change = product(output, layers_[l].output, kWidth);
      for (std::size_t i = 0; i < change.size(); ++i) pass.hidden[i] += std::tanh(change[i]);
      for (std::size_t i = 0; i < keys.size(); i += kDim)
        pass.scores[l].push_back(
            static_cast<float>(verkv::key_norm_importance(std::span(&keys[i], kDim))));
    }
    return pass;
  }

  // The token that follows a row, drawn with the random numbers of (seed, position).
  int next(std::span<const float> hidden, std::uint64_t seed, int position) const {
    int best = 0;
    float most = -1e9f;
    for (int token = 0; token < kVocabulary; ++token) {
      float logit = 0;
      for (std::size_t i = 0; i < kWidth; ++i) logit += hidden[i] * embedding(token, i);
      const auto place = static_cast<std::uint64_t>(position);
      logit += 3 * chance(seed, place, static_cast<std::uint64_t>(token));
      if (logit > most) most = logit, best = token;
    }
    return best;
  }

  // [token][head][kDim].
  static verkv::TensorView view(const Floats& x, int heads) {
    return verkv::token_major(x.data(), verkv::DType::f32, std::ssize(x) / heads / kDim, heads,
                              kDim);
  }

 private:
  struct Layer {
    Floats query, key, value, output;
  };

  Floats noise(std::size_t size) {
    std::normal_distribution<float> normal(0, 0.4f);
    Floats all(size);
    std::generate(all.begin(), all.end(), [&] { return normal(random_); });
    return all;
  }

  float embedding(int token, std::size_t i) const {
    return embeddings_[static_cast<std::size_t>(token) * kWidth + i];
  }

  // Rows times a matrix [width of a row][width].
  static Floats product(const Floats& rows, const Floats& matrix, std::size_t width) {
    const std::size_t inner = matrix.size() / width;
    Floats all(rows.size() / inner * width);
    for (std::size_t row = 0; row < rows.size() / inner; ++row)
      for (std::size_t i = 0; i < inner; ++i)
        for (std::size_t j = 0; j < width; ++j)
          all[row * width + j] += rows[row * inner + i] * matrix[i * width + j];
    return all;
  }

  std::mt19937 random_{7};
  std::array<Layer, kLayers> layers_;
  Floats embeddings_ = noise(kVocabulary * kWidth);
};

#endif  // VERKV_SERVING_LOOP_TOY_MODEL_HPP
