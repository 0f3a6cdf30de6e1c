#include "property/twin.hpp"

#include <algorithm>
#include <utility>

namespace verkv::test {
namespace {

// Of `block`, heads [first, first + count).
TensorView heads_of(const Block& block, std::int64_t first, std::int64_t count) {
  TensorView view = block.view();
  view.data = block.data.data() + (block.tokens > 0 ? first * block.dim : 0);
  view.heads = count;
  return view;
}

}  // namespace

TwinCache::TwinCache(const CacheConfig& config) : config_(config) {
  config_.layers.clear();
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const LayerConfig& layer = config.layers[l];
    first_.push_back(static_cast<std::int64_t>(config_.layers.size()));
    // The KV heads of a pool cannot be told apart.
    const bool splits = layer.cached && config.pool == Pool::head;
    const std::int64_t parts = splits ? layer.kv_heads : 1;
    for (std::int64_t h = 0; h < parts; ++h) {
      LayerConfig part = layer;
      part.kv_heads /= parts;
      part.query_heads /= parts;
      part.global_layer = static_cast<std::int64_t>(l);
      part.first_global_kv_head += h;
      if (!part.sink_logits.empty()) {
        const auto begin = layer.sink_logits.begin() + h * part.query_heads;
        part.sink_logits.assign(begin, begin + part.query_heads);
      }
      config_.layers.push_back(part);
    }
  }
  first_.push_back(static_cast<std::int64_t>(config_.layers.size()));
  config_.fast_bytes_limit.reset();
  config_.host_bytes_limit.reset();
  config_.host = HostTier::own;
  config_.host_directory.clear();
  config_.threads = 1;
  config_.study.vector_code = false;
  cache_ = make_cpu_cache(config_);
}

Twin::Twin(TwinCache& cache, std::uint64_t draw)
    : cache_(&cache), draw_(draw), id_(cache.cache().create_sequence(draw)) {}

Twin::~Twin() { cache_->cache().erase(id_); }

std::unique_ptr<Twin> Twin::told_again() const {
  auto other = std::make_unique<Twin>(*cache_, draw_);
  for (const Call& call : calls_) other->tell(call);
  return other;
}

void Twin::tell(Call call) {
  call(cache_->cache(), id_);
  calls_.push_back(std::move(call));
}

void Twin::append(std::int64_t layer, const Block& keys, const Block& values) {
  const std::int64_t first = cache_->first_part(layer);
  const std::int64_t parts = cache_->parts(layer);
  tell([=](KvCacheManager& cache, SequenceId id) {
    const std::int64_t heads = keys.heads / parts;
    for (std::int64_t p = 0; p < parts; ++p) {
      cache.append(id, first + p, heads_of(keys, p * heads, heads),
                   heads_of(values, p * heads, heads));
    }
  });
}

void Twin::reserve(std::int64_t tokens) {
  tell([=](KvCacheManager& cache, SequenceId id) { cache.reserve(id, tokens); });
}

bool Twin::truncate(std::int64_t tokens) {
  bool done = false;
  tell([&done, tokens](KvCacheManager& cache, SequenceId id) {
    done = cache.truncate(id, tokens).done;
  });
  calls_.back() = [tokens](KvCacheManager& cache, SequenceId id) { cache.truncate(id, tokens); };
  return done;
}

void Twin::compress(const std::vector<Scores>& scores, const std::vector<Block>& queries) {
  std::vector<std::int64_t> parts_of;
  for (std::size_t l = 0; l < scores.size(); ++l)
    parts_of.push_back(cache_->parts(static_cast<std::int64_t>(l)));
  tell([=](KvCacheManager& cache, SequenceId id) {
    std::vector<ImportanceView> importance;
    std::vector<TensorView> prompt;
    for (std::size_t l = 0; l < scores.size(); ++l) {
      for (std::int64_t p = 0; p < parts_of[l]; ++p) {
        ImportanceView view = scores[l].view();
        view.heads /= parts_of[l];
        view.data += p * view.heads * view.head_stride;
        importance.push_back(view);
        if (queries.empty()) continue;
        const std::int64_t heads = queries[l].heads / parts_of[l];
        prompt.push_back(heads_of(queries[l], p * heads, heads));
      }
    }
    cache.compress(id, importance, prompt);
  });
}

void Twin::redraw(std::uint64_t draw) {
  tell([=](KvCacheManager& cache, SequenceId id) { cache.redraw(id, draw); });
}

Result Twin::attend(std::int64_t layer, const Block& queries) {
  const std::int64_t first = cache_->first_part(layer);
  const std::int64_t parts = cache_->parts(layer);
  const std::size_t rows = size(queries.tokens);
  Result result;
  // All parts have one shape.
  const LayerConfig shape = cache_->config().layers[size(first)];
  const auto ask = [=](KvCacheManager& cache, SequenceId id, Result* to) {
    const std::vector<SequenceId> sequences(rows, id);
    for (std::int64_t p = 0; p < parts; ++p) {
      Result part;
      part.output.resize(rows * size(shape.query_heads * shape.value_dim));
      part.lse.resize(rows * size(shape.query_heads));
      part.query.resize(rows * size(shape.query_heads));
      part.kv.resize(rows * size(shape.kv_heads));
      std::vector<RowStatus> status(rows);
      cache.attend(first + p,
                   {sequences, heads_of(queries, p * shape.query_heads, shape.query_heads),
                    part.output, part.lse, part.query, part.kv, status});
      if (to == nullptr) continue;
      const auto place = [&](auto& all, const auto& mine) {
        const std::size_t each = mine.size() / rows;
        all.resize(mine.size() * size(parts));
        for (std::size_t r = 0; r < rows; ++r) {
          std::copy_n(
              mine.begin() + static_cast<std::ptrdiff_t>(r * each), each,
              all.begin() + static_cast<std::ptrdiff_t>((r * size(parts) + size(p)) * each));
        }
      };
      place(to->output, part.output);
      place(to->lse, part.lse);
      place(to->query, part.query);
      place(to->kv, part.kv);
    }
  };
  ask(cache_->cache(), id_, &result);
  calls_.push_back([=](KvCacheManager& cache, SequenceId id) { ask(cache, id, nullptr); });
  return result;
}

std::int64_t Twin::tokens(std::int64_t layer) const {
  return cache_->cache().tokens(id_, cache_->first_part(layer));
}

std::int64_t Twin::compressed_tokens(std::int64_t layer) const {
  return cache_->cache().compressed_tokens(id_, cache_->first_part(layer));
}

MemoryReport Twin::memory() const { return cache_->cache().memory(id_); }

}  // namespace verkv::test
