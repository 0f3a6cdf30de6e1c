// HostTier::file on the CPU, beside a cache with rows in memory that gets the same calls; and what a full
// or failing disk comes to. Random calls are in manager_property_test.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/allocations.hpp"
#include "support/blocks.hpp"
#include "support/configurations.hpp"
#include "support/results.hpp"
#include "support/test_backend.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

CacheConfig in_file(CacheConfig config) {
  config.host = HostTier::file;
  config.host_directory = ".";
  return config;
}

// Descriptors of files that have lost their names, or never had one.
std::vector<int> nameless_files() {
  std::vector<int> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (!error && target.ends_with("(deleted)"))
      files.push_back(std::stoi(entry.path().filename().string()));
  }
  return files;
}

class FilePair {
 public:
  explicit FilePair(const CacheConfig& config)
      : memory(make_cache(config)), file(make_cache(in_file(config))) {}

  struct Both {
    SequenceId memory;
    SequenceId file;
  };

  template <class F>
  void each(F&& f) const {
    for (std::int64_t l = 0; l < static_cast<std::int64_t>(memory->config().layers.size()); ++l)
      f(l, memory->config().layers[size(l)]);
  }
  void append(const Both& both, std::int64_t count) {
    each([&](std::int64_t l, const LayerConfig& layer) {
      const Block keys = random_block(random, count, layer.kv_heads, layer.key_dim, 1);
      const Block values = random_block(random, count, layer.kv_heads, layer.value_dim, 1);
      memory->append(both.memory, l, keys.view(), values.view());
      file->append(both.file, l, keys.view(), values.view());
    });
  }
  void compress(const Both& both) {
    std::vector<Scores> scores;
    each([&](std::int64_t l, const LayerConfig& layer) {
      scores.push_back(
          random_scores(random, layer.kv_heads,
                        memory->tokens(both.memory, l) - memory->compressed_tokens(both.memory, l),
                        ScoreKind::random));
    });
    test::compress(*memory, both.memory, scores);
    test::compress(*file, both.file, scores);
  }
  void attend(const Both& both, std::int64_t rows) {
    each([&](std::int64_t l, const LayerConfig& layer) {
      const Block queries = random_block(random, rows, layer.query_heads, layer.key_dim, 1);
      const std::vector<SequenceId> a(size(rows), both.memory);
      const std::vector<SequenceId> b(size(rows), both.file);
      INFO("layer " << l << ", " << memory->tokens(both.memory, l) << " tokens");
      CHECK(same(test::attend(*file, l, b, queries), test::attend(*memory, l, a, queries)));
      CHECK(file->compressed_tokens(both.file, l) == memory->compressed_tokens(both.memory, l));
      CHECK(file->changed_row(both.file, l) == -1);
    });
  }
  static std::vector<std::byte> saved(const KvCacheManager& cache, SequenceId id) {
    std::vector<std::byte> bytes;
    cache.save(id, [&](std::span<const std::byte> piece) {
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    });
    return bytes;
  }

  Random random{12};
  std::unique_ptr<KvCacheManager> memory;
  std::unique_ptr<KvCacheManager> file;
};

CacheConfig two_layers() {
  CacheConfig config = small_config();
  config.layers = {layer_of(2, 4, 128, 96), layer_of(1, 2, 72, 40)};
  config.storage = DType::f16;
  return config;
}

}  // namespace

TEST_CASE("Rows in a file give the bits of rows in memory", "[cpu]") {
  std::vector<CacheConfig> configs(3, two_layers());
  configs[1].fetch.mode = FetchMode::always;
  configs[1].study.vector_code = false;
  configs[1].storage = DType::bf16;
  configs[2].sketch.kind = SketchKind::exact;
  configs[2].study.estimator = Estimator::plain;
  configs[2].threads = 2;
  for (const CacheConfig& config : configs) {
    FilePair pair(config);
    const FilePair::Both a{pair.memory->create_sequence(1), pair.file->create_sequence(1)};
    pair.attend(a, 1);
    // More fetched tokens than are read at a time.
    for (const std::int64_t count : {1, 300, 63, 130}) pair.append(a, count);
    pair.attend(a, 3);
    pair.compress(a);
    pair.attend(a, 3);
    const FilePair::Both b{pair.memory->fork(a.memory), pair.file->fork(a.file)};
    for (int step = 0; step < 30; ++step) {
      pair.append(a, 1 + step % 3);
      pair.attend(a, 1 + step % 3);
    }
    pair.append(b, 70);
    pair.attend(b, 2);
    pair.memory->redraw(a.memory, 5);
    pair.file->redraw(a.file, 5);
    pair.attend(a, 1);
    CHECK(pair.saved(*pair.memory, a.memory) == pair.saved(*pair.file, a.file));
    pair.memory->truncate(a.memory, 400);
    pair.file->truncate(a.file, 400);
    pair.attend(a, 1);
    pair.append(a, 40);
    pair.attend(a, 2);
    pair.memory->erase(a.memory);
    pair.file->erase(a.file);
    pair.append(b, 3);
    pair.attend(b, 3);
    const std::vector<std::byte> bytes = pair.saved(*pair.memory, b.memory);
    const auto restored = [&](KvCacheManager& cache) {
      std::size_t at = 0;
      return cache.restore([&](std::span<std::byte> to) {
        const std::size_t count = std::min(to.size(), bytes.size() - at);
        std::memcpy(to.data(), bytes.data() + at, count);
        at += count;
        return count;
      });
    };
    const FilePair::Both c{restored(*pair.memory), restored(*pair.file)};
    pair.append(c, 30);
    pair.attend(c, 2);
  }
}

TEST_CASE("Steps over rows in a file allocate nothing", "[cpu]") {
  CacheConfig config = in_file(two_layers());
  config.layers = {layer_of(2, 2, 64, 64)};
  Random random(6);
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence();
  cache->append(id, 0, random_block(random, 300, 2, 64, 1).view(),
                random_block(random, 300, 2, 64, 1).view());
  compress(*cache, id, {random_scores(random, 2, 300, ScoreKind::random)});
  cache->reserve(id, 90);
  const Block row = random_block(random, 1, 2, 64, 1);
  const Block query = random_block(random, 1, 4, 64, 1);
  std::vector<float> output(4 * 64);
  const std::vector<SequenceId> ids{id};
  std::int64_t moved = 0;
  std::vector<KvHeadReport> reports(2);
  const auto step = [&] {
    cache->step(0, row.view(), row.view(), {ids, query.view(), output, {}, {}, reports, {}});
    moved += reports[0].moved_tokens;
  };
  step();
  const std::int64_t before = allocations;
  for (int i = 0; i < 89; ++i) step();
  CHECK(allocations - before == 0);
  CHECK(moved > 0);
}

TEST_CASE("A full disk is an error that changes nothing", "[cpu]") {
  CacheConfig config = in_file(two_layers());
  config.layers = {layer_of(2, 2, 64, 64)};
  Random random(7);
  const auto cache = make_cache(config);
  const SequenceId id = cache->create_sequence();
  const Block rows = random_block(random, 20'000, 2, 64, 1);
  cache->append(id, 0, rows.part(0, 300).view(), rows.part(0, 300).view());
  const Block query = random_block(random, 1, 4, 64, 1);
  const Result answer = attend(*cache, 0, {id}, query);
  const MemoryReport memory = cache->memory();
  // As much as a file may have; beyond it, writing ends the process with a signal.
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit small = before;
  small.rlim_cur = 5 << 20;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  for (const auto& call :
       std::vector<std::function<void()>>{[&] { cache->append(id, 0, rows.view(), rows.view()); },
                                          [&] { cache->reserve(id, 20'000); },
                                          [&] {
                                            const SequenceId other = cache->create_sequence();
                                            try {
                                              cache->append(other, 0, rows.view(), rows.view());
                                            } catch (...) {
                                              cache->erase(other);
                                              throw;
                                            }
                                          }}) {
    bool refused = false;
    try {
      call();
    } catch (const CapacityError& error) {
      refused = true;
      CHECK(error.code() == ErrorCode::file_full);
      check_names(error.what(), {"file of the host tier", "\".\""});
    }
    CHECK(refused);
    CHECK(cache->tokens(id, 0) == 300);
    CHECK(same(attend(*cache, 0, {id}, query), answer));
    CHECK(cache->memory().host_bytes == memory.host_bytes);
  }
  // What the file still has room for comes in.
  cache->append(id, 0, rows.part(0, 3'000).view(), rows.part(0, 3'000).view());
  REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
  cache->append(id, 0, rows.view(), rows.view());
  CHECK(cache->tokens(id, 0) == 23'300);
}

TEST_CASE("A file that cannot be made or read is an error, never a signal", "[cpu]") {
  CacheConfig config = two_layers();
  config.layers = {layer_of(2, 2, 64, 64)};
  config.host = HostTier::file;
  CHECK(unsupported_reasons(config).size() == 1);
  config.host_directory = "no such directory";
  CHECK(unsupported_reasons(config).empty());
  check_names(error_of<FileError>([&] { make_cache(config); }), {"no such directory"});
  config.host_directory = ".";
  const std::vector<int> others = nameless_files();
  const auto cache = make_cache(config);
  std::vector<int> files = nameless_files();
  std::erase_if(files, [&](int one) { return std::count(others.begin(), others.end(), one) > 0; });
  REQUIRE(files.size() == 1);
  config.host = HostTier::own;
  CHECK(unsupported_reasons(config).size() == 1);

  Random random(8);
  const SequenceId id = cache->create_sequence();
  const SequenceId dense = cache->create_sequence();
  const Block rows = random_block(random, 600, 2, 64, 1);
  for (const SequenceId one : {id, dense}) cache->append(one, 0, rows.view(), rows.view());
  compress(*cache, id, {random_scores(random, 2, 600, ScoreKind::random)});
  const Block query = random_block(random, 1, 4, 64, 1);
  const Result of_dense = attend(*cache, 0, {dense}, query);
  REQUIRE(attend(*cache, 0, {id}, query).kv[0].moved_tokens > 0);
  // Somebody else cuts it, or the disk has lost what was written.
  REQUIRE(ftruncate(files[0], 0) == 0);
  const LayerStatistics before = cache->statistics();
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { attend(*cache, 0, {id}, query); }, [&] { cache->redraw(id, 3); },
           [&] { cache->truncate(id, 100); },
           [&] { cache->save(id, [](std::span<const std::byte>) {}); },
           [&] { cache->changed_row(id, 0); },
           [&] {
             std::vector<std::byte> keys(2 * 64 * 2);
             cache->read(id, 0, 0, 1, keys, {});
           }}) {
    check_names(error_of<FileError>(call), {"reading", "cut"});
    CHECK(cache->tokens(id, 0) == 600);
  }
  CHECK(cache->statistics().decisions == before.decisions);
  // What needs no row of the file works on.
  CHECK(same(attend(*cache, 0, {dense}, query), of_dense));
  cache->erase(id);
}
