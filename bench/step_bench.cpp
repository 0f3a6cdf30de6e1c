// The whole verified step through KvCacheManager::attend against blocked dense attention.
//
// Both are timed alternately in one loop, so that a busy machine slows both, and the figures are
// medians over the loop. No speed is printed without its quality and its traffic: one line a case
// has the ratio, ns per cached token (and KV head), bytes read, tokens moved and the errors of D
// and of the output against the dense result.
#include <benchmark/benchmark.h>
#include <time.h>

#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>
#include <verkv/recorded_cache.hpp>

#include "dense.hpp"
#include "support.hpp"
#include "thread_pool.hpp"

namespace {

using namespace verkv;
using namespace verkv::bench;

// One layer of a cache in memory, heads first.
struct Layer {
  LayerConfig config;
  std::int64_t tokens = 0;
  std::vector<float> keys, values, importance;  // [KV head][token]...
  std::vector<float> queries;                   // [step][query head][dim]
};

struct Rule {
  std::string name;
  FetchMode mode = FetchMode::verified;
  std::optional<double> epsilon;
  std::optional<double> risk;
  Estimator estimator = StudyConfig{}.estimator;
};

const std::vector<Rule>& rules() {
  static const std::vector<Rule> list = {
      {"risk:1e-4", FetchMode::verified, {}, 1e-4},
      {"risk:1e-4+plain", FetchMode::verified, {}, 1e-4, Estimator::plain},
      {"eps:0.05", FetchMode::verified, 0.05, {}},
      {"eps:0.1", FetchMode::verified, 0.1, {}},
      {"eps:0.3+risk:1e-4", FetchMode::verified, 0.3, 1e-4},
      {"never", FetchMode::never, {}, {}},
  };
  return list;
}

struct Case {
  std::optional<SyntheticShape> synthetic;  // none: the recorded cache
  DType storage = DType::f16;
  int threads = 1;
  Rule rule;
};

std::vector<Layer> recorded_layers() {
  const RecordedCache recording = RecordedCache::load(VERKV_BENCH_RECORDING);
  const auto copy = [](const TensorView& view, bool heads_first) {
    std::vector<float> out;
    const std::int64_t outer = heads_first ? view.heads : view.tokens;
    const std::int64_t inner = heads_first ? view.tokens : view.heads;
    for (std::int64_t a = 0; a < outer; ++a) {
      for (std::int64_t b = 0; b < inner; ++b) {
        const Rows row{heads_first ? view.row(b, a) : view.row(a, b), view.type, 0,
                       static_cast<int>(view.dim)};
        for (std::int64_t j = 0; j < view.dim; ++j) out.push_back(load_element(row, 0, j));
      }
    }
    return out;
  };
  std::vector<Layer> layers;
  for (const RecordedLayer& recorded : recording.layers()) {
    Layer layer;
    layer.config.kv_heads = recorded.kv_heads;
    layer.config.query_heads = recorded.query_heads;
    layer.config.key_dim = recorded.key_dim;
    layer.config.value_dim = recorded.value_dim;
    layer.config.scale = recording.scale();
    layer.tokens = recording.prompt_tokens();
    layer.keys = copy(recorded.key, true);
    layer.values = copy(recorded.value, true);
    layer.queries = copy(recorded.query, false);
    const ImportanceView& score = recorded.importance.at("kvzip_rms");
    for (std::int64_t h = 0; h < score.heads; ++h) {
      const float* row = score.data + h * score.head_stride;
      layer.importance.insert(layer.importance.end(), row, row + score.tokens);
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

std::vector<Layer> synthetic_layer(const SyntheticShape& shape) {
  SyntheticCache cache(shape);
  Layer layer;
  layer.config.kv_heads = shape.kv_heads;
  layer.config.query_heads = shape.kv_heads * shape.group;
  layer.config.key_dim = layer.config.value_dim = shape.dim;
  layer.tokens = shape.tokens;
  layer.keys = std::move(cache.keys);
  layer.values = std::move(cache.values);
  layer.importance = std::move(cache.importance);
  layer.queries = std::move(cache.queries);
  std::vector<Layer> layers;
  layers.push_back(std::move(layer));
  return layers;
}

// The layers of the latest case, kept because cases that share them follow each other.
const std::vector<Layer>& layers_of(const Case& c) {
  static std::optional<Case> latest;
  static std::vector<Layer> layers;
  if (!latest || latest->synthetic != c.synthetic) {
    layers.clear();
    layers = c.synthetic ? synthetic_layer(*c.synthetic) : recorded_layers();
    latest = c;
  }
  return layers;
}

// Dense storage and worker threads.
class Dense {
 public:
  Dense(const std::vector<Layer>& layers, DType storage, int threads)
      : pool_(threads), workers_(at(pool_.size()), DenseAttention(cpu::vector_kernels())) {
    for (const Layer& layer : layers) {
      tensors_.push_back(stored(layer.keys, storage));
      const std::byte* keys = tensors_.back().data();
      tensors_.push_back(stored(layer.values, storage));
      const std::byte* values = tensors_.back().data();
      std::vector<DenseHead> heads;
      for (std::int64_t h = 0; h < layer.config.kv_heads; ++h) {
        const auto rows = [&](const std::byte* data, std::int64_t dim) {
          return Rows{
              data + h * layer.tokens * dim * static_cast<std::int64_t>(size_bytes(storage)),
              storage, dim, static_cast<int>(dim)};
        };
        DenseHead head;
        head.keys = rows(keys, layer.config.key_dim);
        head.values = rows(values, layer.config.value_dim);
        head.tokens = layer.tokens;
        head.group = static_cast<int>(layer.config.query_heads / layer.config.kv_heads);
        head.scale = static_cast<float>(
            layer.config.scale.value_or(1 / std::sqrt(static_cast<double>(layer.config.key_dim))));
        heads.push_back(head);
      }
      heads_.push_back(std::move(heads));
    }
  }

  double bytes() const {
    double sum = 0;
    for (const auto& tensor : tensors_) sum += static_cast<double>(tensor.size());
    return sum;
  }

  void run(std::size_t layer, const float* queries, float* output, float* lse) {
    const std::vector<DenseHead>& heads = heads_[layer];
    const auto task = [&](int worker, std::int64_t h) {
      const DenseHead& head = heads[at(h)];
      const std::int64_t first = h * head.group;
      workers_[at(worker)].run(head, queries + first * head.keys.dim,
                               output + first * head.values.dim, lse + first);
    };
    pool_.run(static_cast<std::int64_t>(heads.size()), task);
  }

 private:
  ThreadPool pool_;
  std::vector<DenseAttention> workers_;
  std::vector<std::vector<std::byte>> tensors_;
  std::vector<std::vector<DenseHead>> heads_;
};

// Everything a case needs; runs one decode step of all layers either way.
class Setup {
 public:
  explicit Setup(const Case& c) : layers_(layers_of(c)), dense_(layers_, c.storage, c.threads) {
    CacheConfig config;
    std::vector<ImportanceView> importance;
    for (const Layer& layer : layers_) {
      config.layers.push_back(layer.config);
      importance.push_back(
          {layer.importance.data(), layer.config.kv_heads, layer.tokens, layer.tokens});
      largest_query_ = std::max(largest_query_, layer.config.query_heads);
      largest_output_ =
          std::max(largest_output_, layer.config.query_heads * layer.config.value_dim);
    }
    config.storage = c.storage;
    config.threads = c.threads;
    config.keep = 1.0 / 16;
    config.fetch.mode = c.rule.mode;
    config.fetch.epsilon = c.rule.epsilon;
    config.fetch.risk = c.rule.risk;
    config.study.estimator = c.rule.estimator;
    cache_ = make_cpu_cache(config);
    sequence_ = cache_->create_sequence(0);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      const LayerConfig& shape = layer.config;
      cache_->append(
          sequence_, static_cast<std::int64_t>(l),
          head_major(layer.keys.data(), DType::f32, layer.tokens, shape.kv_heads, shape.key_dim),
          head_major(layer.values.data(), DType::f32, layer.tokens, shape.kv_heads,
                     shape.value_dim));
    }
    cache_->compress(sequence_, importance);
    output_.resize(at(largest_output_));
    lse_.resize(at(largest_query_));
    measure_quality();
  }

  std::int64_t steps() const {
    const Layer& layer = layers_.front();
    return static_cast<std::int64_t>(layer.queries.size()) /
           (layer.config.query_heads * layer.config.key_dim);
  }
  double cached_tokens() const {
    double sum = 0;
    for (const Layer& layer : layers_)
      sum += static_cast<double>(layer.tokens * layer.config.kv_heads);
    return sum;
  }

  void run_dense(std::int64_t step) {
    for (std::size_t l = 0; l < layers_.size(); ++l)
      dense_.run(l, query(l, step), output_.data(), lse_.data());
  }
  void run_step(std::int64_t step) {
    for (std::size_t l = 0; l < layers_.size(); ++l) attend(l, step, output_.data(), lse_.data());
  }

  double output_error = 0;  // medians over query heads and steps
  double denominator_error = 0;
  double moved_percent = 0;
  double step_bytes = 0;  // resident rows, sketch, metadata and moved rows of one step
  double dense_bytes = 0;

 private:
  const float* query(std::size_t l, std::int64_t step) const {
    const LayerConfig& shape = layers_[l].config;
    return layers_[l].queries.data() + step * shape.query_heads * shape.key_dim;
  }

  void attend(std::size_t l, std::int64_t step, float* output, float* lse) {
    const LayerConfig& shape = layers_[l].config;
    AttendBatch batch;
    batch.sequences = {&sequence_, 1};
    batch.queries = token_major(query(l, step), DType::f32, 1, shape.query_heads, shape.key_dim);
    batch.output = {output, at(shape.query_heads * shape.value_dim)};
    batch.lse = {lse, at(shape.query_heads)};
    cache_->attend(static_cast<std::int64_t>(l), batch);
  }

  void measure_quality() {
    std::vector<double> of_output, of_denominator;
    std::vector<float> exact(at(largest_output_)), exact_lse(at(largest_query_));
    for (std::int64_t step = 0; step < steps(); ++step) {
      for (std::size_t l = 0; l < layers_.size(); ++l) {
        const LayerConfig& shape = layers_[l].config;
        dense_.run(l, query(l, step), exact.data(), exact_lse.data());
        attend(l, step, output_.data(), lse_.data());
        for (std::int64_t h = 0; h < shape.query_heads; ++h) {
          double difference = 0, length = 0;
          for (std::int64_t j = h * shape.value_dim; j < (h + 1) * shape.value_dim; ++j) {
            const double x = static_cast<double>(exact[at(j)]);
            const double d = static_cast<double>(output_[at(j)]) - x;
            difference += d * d;
            length += x * x;
          }
          of_output.push_back(std::sqrt(difference / length));
          of_denominator.push_back(std::fabs(std::expm1(static_cast<double>(lse_[at(h)]) -
                                                        static_cast<double>(exact_lse[at(h)]))));
        }
      }
    }
    output_error = median(of_output);
    denominator_error = median(of_denominator);
    double moved = 0, moved_bytes = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerStatistics statistics = cache_->statistics(static_cast<std::int64_t>(l));
      moved += static_cast<double>(statistics.moved_tokens);
      moved_bytes += static_cast<double>(statistics.moved_bytes);
    }
    const double all = static_cast<double>(steps());
    moved_percent = 100 * moved / all / cached_tokens();
    dense_bytes = dense_.bytes();
    step_bytes = static_cast<double>(cache_->memory(sequence_).fast_bytes()) + moved_bytes / all;
  }

  const std::vector<Layer>& layers_;
  Dense dense_;
  std::unique_ptr<KvCacheManager> cache_;
  SequenceId sequence_;
  std::int64_t largest_query_ = 0;
  std::int64_t largest_output_ = 0;
  std::vector<float> output_, lse_;
};

// With one thread its processor time, which other programs disturb least; with several the time
// that passes.
double now_ns(int threads) {
  timespec t{};
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

void run_case(benchmark::State& state, const Case& c, const std::string& name) {
  // Google Benchmark calls once to find the number of iterations and once for each repetition.
  static std::string latest;
  static std::unique_ptr<Setup> setup;
  if (latest != name) {
    setup.reset();
    setup = std::make_unique<Setup>(c);
    latest = name;
  }
  std::vector<double> dense_ns, step_ns;
  std::int64_t step = 0;
  for (auto _ : state) {
    const double start = now_ns(c.threads);
    setup->run_dense(step);
    const double middle = now_ns(c.threads);
    setup->run_step(step);
    const double end = now_ns(c.threads);
    dense_ns.push_back(middle - start);
    step_ns.push_back(end - middle);
    state.SetIterationTime(1e-9 * step_ns.back());
    step = (step + 1) % setup->steps();
  }
  const double tokens = setup->cached_tokens();
  state.counters["step_ns_per_token"] = median(step_ns) / tokens;
  state.counters["dense_ns_per_token"] = median(dense_ns) / tokens;
  state.counters["ratio"] = median(dense_ns) / median(step_ns);
  state.counters["step_bytes"] = setup->step_bytes;
  state.counters["dense_bytes"] = setup->dense_bytes;
  state.counters["moved_percent"] = setup->moved_percent;
  state.counters["denominator_error"] = setup->denominator_error;
  state.counters["output_error"] = setup->output_error;
}

// One line of the table a case: medians over the repetitions, and the range of the ratio.
class TableReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override {
    std::printf("%-44s %6s %15s %9s %9s %11s %8s %8s %8s\n", "case", "ratio", "range", "step ns",
                "dense ns", "bytes/dense", "moved %", "D err", "out err");
    std::fflush(stdout);
    return true;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    std::map<std::string, std::vector<double>> values;
    for (const Run& run : runs) {
      if (run.error_occurred)
        std::printf("%s: %s\n", run.benchmark_name().c_str(), run.error_message.c_str());
      // Aggregates come in a call of their own; the table makes its own medians.
      if (run.error_occurred || run.run_type != Run::RT_Iteration) continue;
      for (const auto& [name, counter] : run.counters) values[name].push_back(counter.value);
    }
    if (values.empty()) return;
    const auto middle = [&](const char* name) { return median(values[name]); };
    const auto [least, most] = std::minmax_element(values["ratio"].begin(), values["ratio"].end());
    std::string name = runs.front().run_name.function_name;
    std::printf("%-44s %6.2f   %5.2f - %5.2f %9.2f %9.2f %11.4f %8.3f %8.4f %8.4f\n", name.c_str(),
                middle("ratio"), *least, *most, middle("step_ns_per_token"),
                middle("dense_ns_per_token"), middle("step_bytes") / middle("dense_bytes"),
                middle("moved_percent"), middle("denominator_error"), middle("output_error"));
    std::fflush(stdout);
  }
};

void add(const Case& c) {
  std::string name = "step/";
  if (c.synthetic) {
    name += "n:" + std::to_string(c.synthetic->tokens) +
            "/heads:" + std::to_string(c.synthetic->kv_heads);
  } else {
    name += "recorded";
  }
  name += std::string("/") + verkv::name(c.storage) + "/threads:" + std::to_string(c.threads) +
          "/" + c.rule.name;
  benchmark::RegisterBenchmark(name.c_str(), [c, name](benchmark::State& state) {
    run_case(state, c, name);
  })->UseManualTime();
}

// What the synthetic cache is like, so that nobody has to trust the comment above it.
void describe_synthetic() {
  const SyntheticShape shape{.tokens = 32768};
  const SyntheticCache cache(shape);
  std::vector<double> logit, score, heaviest;
  std::vector<double> deviation, correlated;
  for (std::int64_t row = 0; row < shape.steps * shape.group; ++row) {
    const float* q = cache.queries.data() + row * shape.dim;
    logit.clear();
    score.clear();
    double top = -1e30, sum = 0, square = 0;
    for (std::int64_t i = 0; i < shape.tokens; ++i) {
      double dot = 0;
      for (std::int64_t j = 0; j < shape.dim; ++j) {
        dot += static_cast<double>(q[j]) * static_cast<double>(cache.keys[at(i * shape.dim + j)]);
      }
      logit.push_back(dot / std::sqrt(static_cast<double>(shape.dim)));
      score.push_back(std::log(static_cast<double>(cache.importance[at(i)])));
      top = std::max(top, logit.back());
      sum += logit.back();
      square += logit.back() * logit.back();
    }
    double total = 0;
    for (const double l : logit) total += std::exp(l - top);
    const double n = static_cast<double>(shape.tokens);
    deviation.push_back(std::sqrt(square / n - sum / n * (sum / n)));
    correlated.push_back(correlation(logit, score));
    heaviest.push_back(1 / total);
  }
  std::printf(
      "synthetic cache at 32768 tokens: standard deviation of logits %.2f, largest probability "
      "%.3f, correlation of "
      "log importance and log weight %.2f (medians over %zu queries)\n",
      median(deviation), median(heaviest), median(correlated), deviation.size());
}

}  // namespace

int main(int argc, char** argv) {
  // Defaults first, so that the command line overrides them.
  std::vector<std::string> words = {argv[0], "--benchmark_repetitions=5",
                                    "--benchmark_min_time=0.1"};
  words.insert(words.end(), argv + 1, argv + argc);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  int count = static_cast<int>(pointers.size());
  benchmark::Initialize(&count, pointers.data());
  if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) return 1;

  for (const Rule& rule : rules()) add({std::nullopt, DType::f16, 1, rule});
  for (const std::int64_t tokens : {4096, 8192, 16384, 32768, 65536, 131072}) {
    for (const DType storage : {DType::f16, DType::f32}) {
      for (const Rule& rule : rules()) add({SyntheticShape{.tokens = tokens}, storage, 1, rule});
    }
  }
  for (const int threads : {1, 2}) {
    for (const Rule& rule : rules()) {
      add({SyntheticShape{.tokens = 32768, .kv_heads = 8, .steps = 4}, DType::f16, threads, rule});
    }
  }

  CacheConfig smallest;
  smallest.layers = {LayerConfig{.key_dim = 1, .value_dim = 1}};
  smallest.threads = 1;
  const std::string description = make_cpu_cache(smallest)->description();
  benchmark::AddCustomContext("verkv", description);
  benchmark::AddCustomContext("instruction_set", cpu::vector_kernels().name);
  std::printf(
      "%s, head size 128 (recorded: 64, 3 query heads a KV head), 4 query heads a KV head, 1/16 of "
      "the tokens resident, "
      "2-bit sketch\nns per cached token and KV head; D and output errors: medians against dense\n",
      description.c_str());
  describe_synthetic();
  TableReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();
  return 0;
}
