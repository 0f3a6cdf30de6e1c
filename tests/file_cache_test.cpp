// A context that is longer than the memory it may take: its host tier is in a file. Environment:
// VERKV_FILE_TOKENS, its tokens (docs/CONTRIBUTING.md).
#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::DType;

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kDim = 128;
constexpr std::int64_t kChunk = 2'500;
// Of a token.
constexpr std::int64_t kBytes = kHeads * 2 * kDim * 2;

// Peak resident memory of this process in bytes; 0 where the system does not say.
std::int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

}  // namespace

TEST_CASE("A context in a file takes less than half of its bytes in main memory") {
  const char* const asked = std::getenv("VERKV_FILE_TOKENS");
  const std::int64_t total = (asked == nullptr ? 50'000 : std::atoll(asked)) / kChunk * kChunk;
  verkv::CacheConfig config;
  config.layers = {{.kv_heads = kHeads, .query_heads = kHeads, .key_dim = kDim, .value_dim = kDim}};
  config.keep = 0.05;
  config.threads = 1;
  config.fetch.risk = 1e-7;
  config.host = verkv::HostTier::file;
  config.host_directory = ".";
  config.host_bytes_limit = (total + 63) / 64 * 64 * kBytes;
  verkv::reference::Random random(3);
  std::vector<float> numbers(static_cast<std::size_t>(kChunk * kHeads * kDim));
  const std::vector<float> importance(static_cast<std::size_t>(kHeads * (kChunk + 64)), 1);
  const auto cache = verkv::make_cpu_cache(config);
  const verkv::SequenceId id = cache->create_sequence(1);
#if defined(__GLIBC__)
  // Blocks of windows that were left go back to the system at once; by itself glibc keeps larger and
  // larger ones, in pieces.
  REQUIRE(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
#endif
  const std::int64_t before = peak_memory();
  // In chunks, each compressed before the next.
  const auto append = [&] {
    for (std::size_t i = 0; i < numbers.size(); i += 1 + random.below(40))
      numbers[i] = static_cast<float>(random.normal());
    const verkv::TensorView rows =
        verkv::token_major(numbers.data(), DType::f32, kChunk, kHeads, kDim);
    cache->append(id, 0, rows, rows);
  };
  for (std::int64_t tokens = 0; tokens < total; tokens += kChunk) {
    append();
    const std::int64_t open = cache->tokens(id, 0) - cache->compressed_tokens(id, 0);
    const verkv::ImportanceView view{importance.data(), kHeads, open, open};
    cache->compress(id, std::span(&view, 1));
  }
  std::vector<float> output(static_cast<std::size_t>(kHeads * kDim));
  std::vector<verkv::KvHeadReport> reports(kHeads);
  cache->attend(0, {std::span(&id, 1),
                    verkv::token_major(numbers.data(), DType::f32, 1, kHeads, kDim),
                    output,
                    {},
                    {},
                    reports,
                    {}});
  CHECK(reports[0].moved_tokens > 0);

  const verkv::MemoryReport memory = cache->memory(id);
  const std::int64_t all = total * kBytes;
  CHECK(memory.host_bytes >= all);
  CHECK(memory.host_bytes <= all + 64 * kBytes);
  CHECK(memory.file_bytes >= memory.host_bytes);
  CHECK(cache->memory().file_bytes >= memory.file_bytes);
  CHECK(memory.fast_bytes() + memory.host_bytes + memory.basis_bytes + memory.reserved_bytes -
            memory.file_bytes <
        all / 4);
  const std::int64_t peak = peak_memory() - before;
  INFO("peak " << peak / 1048576 << " MiB, cache " << all / 1048576 << " MiB");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(peak < all / 2);
#endif
  // The limit is on the file's pages.
  CHECK_THROWS_AS(append(), verkv::CapacityError);
  cache->erase(id);
  CHECK(cache->memory().host_bytes == 0);
}
