// Saved sequences: what is cut or altered is refused with a FormatError, also where the checksums are
// made to fit; what is restored serves. An input says which of a few saved sequences is altered
// where: changes of (place, byte), so that a few bytes reach every part of it.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "fuzz/fuzz.hpp"
#include "saved_bytes.hpp"

namespace {

using namespace verkv;
using fuzz::Input;
using fuzz::require;

using Bytes = std::vector<std::byte>;

struct Saved {
  CacheConfig config;
  Bytes bytes;
  // Where sections end: their checksums, of 8 bytes.
  std::vector<std::size_t> checksums;
};

CacheConfig config_of(int kind) {
  CacheConfig config;
  config.layers = {{.kv_heads = 2, .query_heads = 2, .key_dim = 8, .value_dim = 4},
                   {.kv_heads = 1, .query_heads = 1, .key_dim = 4, .value_dim = 4, .dense = true}};
  config.storage = kind == 0 ? DType::f32 : DType::f16;
  config.keep = 0.25;
  config.local_tokens = 4;
  config.chunk_tokens = 8;
  config.compress_from = 0;
  config.threads = 1;
  config.sketch.kind = kind == 1 ? SketchKind::exact : SketchKind::calibrated;
  config.study.estimator = kind == 2 ? Estimator::plain : Estimator::clusters;
  return config;
}

void append(KvCacheManager& cache, SequenceId id, std::int64_t count) {
  const std::vector<LayerConfig>& layers = cache.config().layers;
  std::vector<float> rows(static_cast<std::size_t>(count * 16));
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = std::sin(static_cast<float>(i * i % 1000));
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerConfig& c = layers[l];
    cache.append(id, static_cast<std::int64_t>(l),
                 token_major(rows.data(), DType::f32, count, c.kv_heads, c.key_dim),
                 token_major(rows.data(), DType::f32, count, c.kv_heads, c.value_dim));
  }
}

void attend(KvCacheManager& cache, SequenceId id) {
  const std::vector<LayerConfig>& layers = cache.config().layers;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerConfig& c = layers[l];
    const std::vector<float> query(static_cast<std::size_t>(c.query_heads * c.key_dim), 0.5f);
    std::vector<float> output(static_cast<std::size_t>(c.query_heads * c.value_dim));
    cache.attend(static_cast<std::int64_t>(l),
                 {{&id, 1},
                  token_major(query.data(), DType::f32, 1, c.query_heads, c.key_dim),
                  output,
                  {},
                  {},
                  {},
                  {}});
  }
}

Saved make(int kind) {
  Saved saved{config_of(kind), {}, {}};
  const auto cache = make_cpu_cache(saved.config);
  const SequenceId id = cache->create_sequence(3);
  append(*cache, id, 40);
  const std::vector<float> scores(80, 1.0f);
  const std::vector<ImportanceView> importance(2, {scores.data(), 2, 40, 40});
  cache->compress(id, importance);
  append(*cache, id, 5);
  attend(*cache, id);
  cache->save(id, [&](std::span<const std::byte> piece) {
    saved.bytes.insert(saved.bytes.end(), piece.begin(), piece.end());
  });
  std::size_t begin = 0;
  Checksum sum;
  for (std::size_t at = 0; at + 8 <= saved.bytes.size(); ++at) {
    std::uint64_t stored = 0;
    std::memcpy(&stored, saved.bytes.data() + at, 8);
    if (at > begin && stored == sum.value()) {
      saved.checksums.push_back(at);
      sum = Checksum();
      at += 7;
      begin = at + 1;
      continue;
    }
    sum.add(std::span(saved.bytes).subspan(at, 1));
  }
  require(saved.checksums.size() > 2 && begin == saved.bytes.size(),
          "a saved sequence has sections");
  return saved;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<Saved> all = {make(0), make(1), make(2)};
  Input input(data, size);
  const Saved& saved = all[input.below(3)];
  const bool mends = input.below(4) > 0;
  Bytes bytes = saved.bytes;
  if (input.below(8) == 0) bytes.resize(input.take<std::uint32_t>() % bytes.size());
  for (int changes = 0; !input.empty() && changes < 32 && !bytes.empty(); ++changes) {
    const std::size_t at = input.take<std::uint16_t>() % bytes.size();
    bytes[at] = static_cast<std::byte>(input.take<std::uint8_t>());
  }
  const bool altered = bytes != saved.bytes;
  std::size_t begin = 0;
  for (const std::size_t end : saved.checksums) {
    if (!mends || end + 8 > bytes.size()) break;
    Checksum sum;
    sum.add(std::span(bytes).subspan(begin, end - begin));
    const std::uint64_t value = sum.value();
    std::memcpy(bytes.data() + end, &value, 8);
    begin = end + 8;
  }
  const auto cache = make_cpu_cache(saved.config);
  const SequenceId other = cache->create_sequence();
  append(*cache, other, 3);
  const std::int64_t before = cache->memory().host_bytes;
  std::size_t at = 0;
  try {
    const SequenceId id = cache->restore([&](std::span<std::byte> to) {
      const std::size_t count = std::min(to.size(), bytes.size() - at);
      if (count > 0) std::memcpy(to.data(), bytes.data() + at, count);
      at += count;
      return count;
    });
    require(mends || !altered, "what was altered is refused");
    attend(*cache, id);
    for (int i = 0; i < 3; ++i) append(*cache, id, 6);
    attend(*cache, id);
    cache->redraw(id, 7);
    cache->truncate(id, 20);
    attend(*cache, id);
    cache->erase(id);
  } catch (const FormatError&) {
    require(altered || bytes != saved.bytes, "what was not altered is restored");
  }
  require(cache->memory().host_bytes == before, "nothing is left of what was refused or erased");
  return 0;
}
