// The same sequence by the plainest calls: a cache of its own with one KV head per layer, scalar
// kernels, one thread and no limits, that is told what was done one sequence at a time, never what
// failed. Answers must be the same bits.
#ifndef VERKV_TESTS_PROPERTY_TWIN_HPP
#define VERKV_TESTS_PROPERTY_TWIN_HPP

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "support/blocks.hpp"
#include "support/results.hpp"

namespace verkv::test {

class TwinCache {
 public:
  explicit TwinCache(const CacheConfig& config);

  const CacheConfig& config() const { return config_; }
  KvCacheManager& cache() { return *cache_; }
  // Layers of the twin that stand for a layer of the configuration.
  std::int64_t first_part(std::int64_t layer) const { return first_[size(layer)]; }
  std::int64_t parts(std::int64_t layer) const {
    return first_[size(layer) + 1] - first_[size(layer)];
  }

 private:
  CacheConfig config_;
  std::vector<std::int64_t> first_;
  std::unique_ptr<KvCacheManager> cache_;
};

class Twin {
 public:
  Twin(TwinCache& cache, std::uint64_t draw);
  ~Twin();
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  // Another sequence that is told all that this one was.
  std::unique_ptr<Twin> told_again() const;
  std::size_t calls() const { return calls_.size(); }

  void append(std::int64_t layer, const Block& keys, const Block& values);
  void reserve(std::int64_t tokens);
  bool truncate(std::int64_t tokens);
  // scores and queries: one element per layer of the configuration; queries may be empty.
  void compress(const std::vector<Scores>& scores, const std::vector<Block>& queries);
  void redraw(std::uint64_t draw);
  // Rows that may have bad queries: all rows of `queries` are of this sequence.
  Result attend(std::int64_t layer, const Block& queries);

  std::int64_t tokens(std::int64_t layer) const;
  std::int64_t compressed_tokens(std::int64_t layer) const;
  MemoryReport memory() const;

 private:
  using Call = std::function<void(KvCacheManager&, SequenceId)>;
  void tell(Call call);

  TwinCache* cache_;
  std::uint64_t draw_;
  SequenceId id_;
  std::vector<Call> calls_;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_PROPERTY_TWIN_HPP
