#include "support/configurations.hpp"

#include <algorithm>
#include <cmath>

#include "support/test_backend.hpp"

namespace verkv::test {

std::vector<FetchOrder> orders() {
  return backend().exact_order ? std::vector<FetchOrder>{FetchOrder::worth, FetchOrder::exact}
                               : std::vector<FetchOrder>{FetchOrder::worth};
}

std::vector<bool> vector_codes() {
  return backend().vector_code ? std::vector<bool>{true, false} : std::vector<bool>{true};
}

LayerConfig layer_of(std::int64_t kv_heads, std::int64_t group, std::int64_t key_dim,
                     std::int64_t value_dim) {
  LayerConfig layer;
  layer.kv_heads = kv_heads;
  layer.query_heads = kv_heads * group;
  layer.key_dim = key_dim;
  layer.value_dim = value_dim;
  return layer;
}

std::vector<float> random_sinks(Random& random, std::int64_t query_heads) {
  std::vector<float> sinks;
  for (std::int64_t h = 0; h < query_heads; ++h)
    sinks.push_back(static_cast<float>(3 * random.normal()));
  return sinks;
}

CacheConfig small_config() {
  CacheConfig config;
  config.layers = {layer_of(2, 3, 64, 64)};
  config.storage = DType::f32;
  config.keep = 0.2;
  config.sink_tokens = 2;
  config.local_tokens = 8;
  config.chunk_tokens = 16;
  config.compress_from = 0;
  config.fetch.epsilon = 0.2;
  config.fetch.risk.reset();
  config.threads = 1;
  config.seed = 7;
  return config;
}

Drawn random_setting(Random& random) {
  Drawn drawn;
  CacheConfig& c = drawn.config;
  c.keep = one_of(random, std::vector<double>{0.0625, 0.1, 0.25, 0.5, 0.9});
  const std::vector<std::int64_t> lengths = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129};
  drawn.tokens = random.below(24) == 0 ? 2049 : one_of(random, lengths);
  c.storage = one_of(random, std::vector<DType>{DType::f32, DType::f16, DType::bf16});
  c.pool = one_of(random, std::vector<Pool>{Pool::head, Pool::layer, Pool::sequence});
  const std::size_t select = random.below(4);
  c.study.select = select == 0   ? Selection::topk
                   : select == 1 ? Selection::poisson
                                 : Selection::spread;
  c.study.estimator = random.below(3) == 0 ? Estimator::plain : Estimator::clusters;
  c.study.inclusion_floor = random.below(4) == 0 ? c.keep / 4 : 0;
  c.seed = random.bits();
  c.threads = 1;
  c.chunk_tokens.reset();
  c.compress_from = 0;
  const std::int64_t budget = static_cast<std::int64_t>(c.keep * static_cast<double>(drawn.tokens));
  c.sink_tokens = one_of(random, std::vector<std::int64_t>{0, 1, 4});
  // The window: none, some, exactly what the budget can pay or one to either side, larger than
  // everything.
  c.local_tokens = std::max<std::int64_t>(
      0, one_of(random, std::vector<std::int64_t>{0, 0, 2, budget - c.sink_tokens - 1,
                                                  budget - c.sink_tokens,
                                                  budget - c.sink_tokens + 1, drawn.tokens + 5}));
  if (random.below(12) == 0) c.sink_tokens = drawn.tokens + 3;
  c.sketch = one_of(random, std::vector<verkv::SketchConfig>{{SketchKind::exact, 2},
                                                             {SketchKind::calibrated, 2},
                                                             {SketchKind::calibrated, 2},
                                                             {SketchKind::calibrated, 3},
                                                             {SketchKind::calibrated, 4}});
  c.fetch.epsilon.reset();
  c.fetch.risk.reset();
  c.fetch.delta = one_of(random, std::vector<double>{0.05, 0.1, 0.3});
  const double epsilon = one_of(random, std::vector<double>{0.02, 0.1, 0.3, 0.8});
  const double risk = one_of(random, std::vector<double>{1e-6, 1e-4, 1e-2});
  switch (random.below(7)) {
    case 0:
      c.fetch.epsilon = epsilon;
      break;
    case 1:
      c.fetch.risk = risk;
      break;
    case 2:
      c.fetch.epsilon = epsilon;
      c.fetch.risk = risk;
      break;
    case 3:
      c.study.probability = one_of(random, std::vector<double>{1e-3, 1e-2, 0.1});
      break;
    case 4:
      c.fetch.mode = FetchMode::never;
      break;
    case 5:
      c.fetch.mode = FetchMode::always;
      break;
    default:
      c.fetch.epsilon = epsilon;
      c.fetch.risk = 1e-3;
      c.study.probability = 0.01;
      break;
  }
  if (backend().exact_order && drawn.tokens <= 65 && random.below(4) == 0)
    c.study.order = FetchOrder::exact;
  c.study.cap = one_of(random, kCaps);
  if (random.below(6) == 0)
    c.fetch.limit_tokens = one_of(random, std::vector<std::int64_t>{1, 5, 20});

  const std::size_t layers = 1 + random.below(2);
  for (std::size_t l = 0; l < layers; ++l) {
    const std::int64_t dim =
        one_of(random, std::vector<std::int64_t>{64, 80, 96, 100, 112, 128, 256});
    const std::int64_t group = one_of(random, std::vector<std::int64_t>{1, 2, 5, 6, 7, 8, 12, 16});
    LayerConfig layer = layer_of(1 + static_cast<std::int64_t>(random.below(2)), group, dim,
                                 random.below(3) == 0 ? 48 : dim);
    if (drawn.tokens > 200) layer.kv_heads = 1;
    if (drawn.tokens > 200) layer.query_heads = group;
    if (random.below(4) == 0) layer.soft_cap = 5;
    if (random.below(4) == 0) layer.scale = 0.11;
    layer.first_global_kv_head = random.below(3) == 0 ? 4 : 0;
    if (random.below(4) == 0) layer.sink_logits = random_sinks(random, layer.query_heads);
    c.layers.push_back(layer);
  }
  if (layers > 1 && random.below(4) == 0) c.layers[1].dense = true;
  drawn.logit_spread = one_of(random, std::vector<double>{0.5, 1.5, 4});
  drawn.scores = one_of(
      random, std::vector<ScoreKind>{ScoreKind::random, ScoreKind::random, ScoreKind::random,
                                     ScoreKind::zero, ScoreKind::equal, ScoreKind::with_zeros});

  std::ostringstream text;
  text << "n " << drawn.tokens << ", d " << c.layers[0].key_dim << ", group "
       << c.layers[0].query_heads / c.layers[0].kv_heads << ", layers " << layers << ", "
       << verkv::name(c.storage) << ", keep " << c.keep << ", floor " << c.study.inclusion_floor
       << ", pool " << static_cast<int>(c.pool) << ", select " << static_cast<int>(c.study.select)
       << ", sink " << c.sink_tokens << ", local " << c.local_tokens << ", sketch "
       << static_cast<int>(c.sketch.kind) << "/" << c.sketch.bits << ", mode "
       << static_cast<int>(c.fetch.mode) << ", eps " << shown(c.fetch.epsilon) << ", risk "
       << shown(c.fetch.risk) << ", p " << shown(c.study.probability) << ", order "
       << static_cast<int>(c.study.order) << ", cap " << shown(c.study.cap) << ", limit "
       << shown(c.fetch.limit_tokens) << ", spread " << drawn.logit_spread << ", scores "
       << static_cast<int>(drawn.scores) << ", soft cap " << shown(c.layers[0].soft_cap)
       << ", sinks " << !c.layers[0].sink_logits.empty();
  drawn.text = text.str();
  return drawn;
}

}  // namespace verkv::test
