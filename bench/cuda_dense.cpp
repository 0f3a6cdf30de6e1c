#include "cuda_dense.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace verkv::bench {
namespace {

// Tokens below which a block is not worth its start.
constexpr std::int64_t kSplitTokens = 512;

int splits_for(std::int64_t tokens) {
  return static_cast<int>((tokens + kSplitTokens - 1) / kSplitTokens);
}

DensePart part_of(const Scene& scene, const std::byte* rows, std::int64_t tokens) {
  DensePart part;
  part.rows = rows;
  part.pair_bytes = tokens * kRowBytes;
  part.tokens = tokens;
  part.queries = static_cast<const float*>(scene.prompt().queries().data);
  part.scale = scene.scale();
  return part;
}

}  // namespace

DenseBuffers::DenseBuffers(int all_pairs, int splits)
    : pairs(all_pairs),
      top(std::int64_t{pairs} * splits * kDenseGroup, "partial states"),
      sum(top.size(), "partial states"),
      partial(top.size() * kDenseDim, "partial states"),
      output(std::int64_t{pairs} * kDenseGroup * kDenseDim, "outputs") {}

DenseStates DenseBuffers::states(int splits) const {
  return {top.data(), sum.data(), partial.data(), splits};
}

ResidentDense::ResidentDense(const Scene& scene, int rows, int multiprocessors, cudaStream_t stream)
    : scene_(scene),
      pairs_(rows * static_cast<int>(scene.kv_heads())),
      rows_(Scene::pinned_bytes(scene.tokens(), scene.kv_heads(), rows), "dense attention"),
      buffers_(pairs_, splits_for(scene.tokens())) {
  for (const int blocks : {2, 4, 8, 16}) {
    const int wanted = (blocks * multiprocessors + pairs_ - 1) / pairs_;
    const int count = std::clamp(wanted, 1, splits_for(scene.tokens()));
    if (splits_.empty() || splits_.back() != count) splits_.push_back(count);
  }
  std::byte* to = rows_.data();
  const std::size_t bytes = at(scene.tokens() * kRowBytes);
  for (int row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < scene.kv_heads(); ++head, to += bytes) {
      VERKV_CUDA_CHECK(
          cudaMemcpyAsync(to, scene.host_rows(row, head), bytes, cudaMemcpyHostToDevice, stream));
    }
  }
  VERKV_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void ResidentDense::enqueue(int splits, cudaStream_t stream) const {
  DensePart part = part_of(scene_, rows_.data(), scene_.tokens());
  part.pairs = pairs_;
  part.splits = splits;
  const DenseStates states = buffers_.states(splits);
  VERKV_CUDA_CHECK(launch_dense_part(part, states, stream));
  VERKV_CUDA_CHECK(launch_dense_merge(states, pairs_, buffers_.output.data(), stream));
}

OffloadedDense::OffloadedDense(const Scene& scene, int rows, std::int64_t piece_bytes)
    : scene_(scene),
      rows_(rows),
      piece_tokens_(std::clamp<std::int64_t>(piece_bytes / kRowBytes, 1, scene.tokens())),
      piece_splits_(splits_for(piece_tokens_)),
      pieces_(static_cast<int>((scene.tokens() + piece_tokens_ - 1) / piece_tokens_)),
      buffers_(rows * static_cast<int>(scene.kv_heads()), pieces_ * piece_splits_) {
  for (auto& piece : piece_)
    piece = cuda::DeviceBuffer<std::byte>(piece_tokens_ * kRowBytes, "a piece of dense attention");
}

std::int64_t OffloadedDense::bytes() const {
  return Scene::pinned_bytes(scene_.tokens(), scene_.kv_heads(), rows_);
}

void OffloadedDense::enqueue(cudaStream_t stream) {
  const DenseStates states = buffers_.states(pieces_ * piece_splits_);
  start_.record(stream);
  VERKV_CUDA_CHECK(cudaStreamWaitEvent(copies_, start_, 0));
  for (int i = 0; i < buffers_.pairs * pieces_; ++i) {
    const int pair = i / pieces_;
    const int side = i % 2;
    const std::int64_t first = i % pieces_ * piece_tokens_;
    const std::int64_t count = std::min(piece_tokens_, scene_.tokens() - first);
    const int heads = static_cast<int>(scene_.kv_heads());
    if (i >= 2) VERKV_CUDA_CHECK(cudaStreamWaitEvent(copies_, computed_[side], 0));
    VERKV_CUDA_CHECK(cudaMemcpyAsync(
        piece_[side].data(), scene_.host_rows(pair / heads, pair % heads) + first * kRowBytes,
        at(count * kRowBytes), cudaMemcpyHostToDevice, copies_));
    copied_[side].record(copies_);
    VERKV_CUDA_CHECK(cudaStreamWaitEvent(stream, copied_[side], 0));
    DensePart part = part_of(scene_, piece_[side].data(), count);
    part.queries += std::int64_t{pair} * kDenseGroup * kDenseDim;
    part.splits = piece_splits_;
    part.first_split = i % pieces_ * piece_splits_;
    VERKV_CUDA_CHECK(launch_dense_part(part, states.of_pair(pair), stream));
    computed_[side].record(stream);
  }
  VERKV_CUDA_CHECK(launch_dense_merge(states, buffers_.pairs, buffers_.output.data(), stream));
}

std::vector<double> reference_attention(const Scene& scene, int row, std::int64_t head) {
  std::vector<double> result;
  const std::byte* rows = scene.host_rows(row, head);
  const auto element = [&](std::int64_t token, std::int64_t j) {
    Half half;
    std::memcpy(&half, rows + token * kRowBytes + 2 * j, sizeof half);
    return static_cast<double>(to_float(half));
  };
  std::vector<double> logit(at(scene.tokens()));
  for (std::int64_t g = 0; g < kDenseGroup; ++g) {
    const float* query = scene.prompt().host_query(row, head * kDenseGroup + g);
    double top = -INFINITY;
    for (std::int64_t i = 0; i < scene.tokens(); ++i) {
      double dot = 0;
      for (std::int64_t j = 0; j < kDenseDim; ++j)
        dot += static_cast<double>(query[j]) * element(i, j);
      logit[at(i)] = static_cast<double>(scene.scale()) * dot;
      top = std::max(top, logit[at(i)]);
    }
    double sum = 0;
    std::vector<double> output(kDenseDim);
    for (std::int64_t i = 0; i < scene.tokens(); ++i) {
      const double weight = std::exp(logit[at(i)] - top);
      sum += weight;
      for (std::int64_t j = 0; j < kDenseDim; ++j)
        output[at(j)] += weight * element(i, kDenseDim + j);
    }
    for (const double x : output) result.push_back(x / sum);
  }
  return result;
}

}  // namespace verkv::bench
