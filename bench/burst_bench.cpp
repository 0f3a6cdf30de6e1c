// What several tokens of a sequence cost in one call of KvCacheManager::attend, as a multiple of one
// token. Both are timed alternately in one loop, in processor time of the one thread, and the figures
// are medians over the loop.
#include <benchmark/benchmark.h>
#include <time.h>

#include <memory>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "support.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

struct Scene {
  explicit Scene(const SyntheticShape& shape) : data(shape) {
    CacheConfig config;
    config.layers = {{.kv_heads = shape.kv_heads,
                      .query_heads = shape.kv_heads * shape.group,
                      .key_dim = shape.dim,
                      .value_dim = shape.dim}};
    config.threads = 1;
    cache = make_cpu_cache(config);
    sequence = cache->create_sequence(0);
    cache->append(
        sequence, 0,
        head_major(data.keys.data(), DType::f32, shape.tokens, shape.kv_heads, shape.dim),
        head_major(data.values.data(), DType::f32, shape.tokens, shape.kv_heads, shape.dim));
    const ImportanceView importance{data.importance.data(), shape.kv_heads, shape.tokens,
                                    shape.tokens};
    cache->compress(sequence, {&importance, 1});
    rows.assign(at(shape.steps), sequence);
    output.resize(data.queries.size());
  }

  // Nanoseconds of a call with so many tokens.
  double attend(std::int64_t tokens) {
    const SyntheticShape& shape = data.shape;
    const std::int64_t heads = shape.kv_heads * shape.group;
    AttendBatch batch;
    batch.sequences = std::span(rows).first(at(tokens));
    batch.queries = token_major(data.queries.data(), DType::f32, tokens, heads, shape.dim);
    batch.output = std::span(output).first(at(tokens * heads * shape.dim));
    const double start = now();
    cache->attend(0, batch);
    return now() - start;
  }

  static double now() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
  }

  SyntheticCache data;
  std::unique_ptr<KvCacheManager> cache;
  SequenceId sequence;
  std::vector<SequenceId> rows;
  std::vector<float> output;
};

void run(benchmark::State& state, std::int64_t group, std::int64_t tokens) {
  // Cases that share a scene follow each other.
  static std::unique_ptr<Scene> scene;
  if (!scene || scene->data.shape.group != group) {
    scene.reset();
    scene = std::make_unique<Scene>(SyntheticShape{.tokens = 32768, .group = group, .dim = 128});
  }
  std::vector<double> one, many;
  for (auto _ : state) {
    one.push_back(scene->attend(1));
    many.push_back(scene->attend(tokens));
    state.SetIterationTime(1e-9 * many.back());
  }
  state.counters["us_of_one"] = 1e-3 * median(one);
  state.counters["us_together"] = 1e-3 * median(many);
  state.counters["times_one"] = median(many) / median(one);
}

}  // namespace

int main(int argc, char** argv) {
  for (const std::int64_t group : {1, 2, 4, 8}) {
    for (const std::int64_t tokens : {2, 4, 8}) {
      const std::string name =
          "burst/n:32768/group:" + std::to_string(group) + "/tokens:" + std::to_string(tokens);
      benchmark::RegisterBenchmark(name.c_str(), [group, tokens](benchmark::State& state) {
        run(state, group, tokens);
      })->UseManualTime();
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
