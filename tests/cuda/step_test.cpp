// The device's step against the CPU's, which is the specification: decisions bit for bit, outputs
// within rounding.
#include "step.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "catch.hpp"
#include "cudart.hpp"
#include "step_support.hpp"

using namespace verkv;
using namespace verkv::cuda;
using namespace verkv::cuda::test;

namespace {

std::string first_fault() {
  const auto& faults = cpu_device::current_device().faults();
  return faults.empty() ? "" : faults.front().what();
}

// Runs a step and compares it; returns what the CPU decided.
Scene::Totals require_one_equal(const Setup& setup,
                                const std::function<void(std::vector<float>&)>& edit) {
  Scene scene(setup);
  scene.draw_queries(edit);
  scene.upload();
  std::string wrong;
  try {
    scene.launch(nullptr);
    wrong = scene.compare();
  } catch (const std::exception& e) {
    wrong = e.what();
  }
  CAPTURE(setup.group, setup.key_dim, setup.value_dim, setup.sketch.bits, setup.seed,
          name(setup.storage), setup.clusters);
  REQUIRE(first_fault() == "");
  REQUIRE(wrong == "");
  return scene.totals();
}

// The same under both estimators, which decide alike.
Scene::Totals require_equal(Setup setup,
                            const std::function<void(std::vector<float>&)>& edit = {}) {
  setup.clusters = false;
  const Scene::Totals plain = require_one_equal(setup, edit);
  setup.clusters = true;
  const Scene::Totals totals = require_one_equal(setup, edit);
  REQUIRE(plain.by_clusters == 0);
  REQUIRE(plain.fetched == totals.fetched);
  REQUIRE(plain.moved == totals.moved);
  return totals;
}

// Small sizes that still have several blocks of 512 and a ragged end.
Setup small(std::uint32_t seed) {
  Setup setup;
  setup.kv_heads = 1;
  setup.group = 2;
  setup.key_dim = 64;
  setup.value_dim = 64;
  setup.lengths = {{1300, 1250}};
  setup.seed = seed;
  return setup;
}

}  // namespace

TEST_CASE("A step equals the CPU's at the defaults, in four launches", "[cpu-device]") {
  cpu_device::reset_device();
  const Setup setup;
  const std::int64_t heads = setup.kv_heads * setup.group;
  REQUIRE(require_equal(setup).by_clusters == heads);
  REQUIRE(cpu_device::current_device().launches().size() == 2 * 4);
}

// The sketch is read once for a group of query heads, a host row once if it moves and never else.
TEST_CASE("Bytes that a step reads", "[cpu-device]") {
  cpu_device::reset_device();
  Setup setup = small(50);
  setup.group = 8;
  setup.fetch.epsilon = kOff;
  setup.query_size = 3;
  setup.lengths = {{1600, 1568}};  // an even number of groups
  Scene scene(setup);
  scene.draw_queries();
  scene.upload();
  scene.launch(nullptr);
  REQUIRE(scene.compare() == "");
  REQUIRE(first_fault() == "");
  cpu_device::Device& device = cpu_device::current_device();
  REQUIRE(device.launches().size() == 4);
  const auto bytes_read = [&](std::size_t launch, const void* memory) {
    const std::uint32_t id = device.memory().at(cpu_device::Device::address_of(memory), 1).id;
    const auto& allocations = device.launches()[launch].counters.allocations;
    const auto found = allocations.find(id);
    return found == allocations.end() ? 0 : static_cast<std::int64_t>(found->second.read_bytes);
  };
  const HeadView& head = scene.head_view(0, 0);
  // A warp takes 64 tokens at a time, and reads the last group again for those that are not there.
  CHECK(bytes_read(0, head.codes) ==
        code_storage_bytes(scene.store(0, 0).sketch(scene.shape()), 1600));
  const std::int64_t moved = scene.totals().moved;
  REQUIRE(moved > 20);
  CHECK(bytes_read(3, head.host_rows) == moved * scene.shape().row_bytes());
  for (std::size_t launch = 0; launch < 3; ++launch) CHECK(bytes_read(launch, head.host_rows) == 0);
}

TEST_CASE("Splits of the scores") {
  LayerView layer;
  layer.kv_heads = 8;
  layer.group = 4;
  layer.key_dim = layer.value_dim = 128;
  const auto splits = [&](int rows, std::int64_t compressed, std::int64_t residents) {
    return step_grid(layer, rows, compressed, residents).score_splits;
  };
  // 132 blocks run at a time.
  CHECK(splits(1, 0, 0) == 1);
  CHECK(splits(1, 900, 100) == 1);
  CHECK(splits(1, 32672, 2138) == 16);
  CHECK(splits(1, 131072, 8192) == 16);
  CHECK(splits(16, 32672, 2138) == 1);
  CHECK(splits(20, 32672, 2138) == 4);  // 160 pairs, in five turns
  layer.kv_heads = 1;
  CHECK(splits(1, 1 << 20, 1 << 16) == 64);
  layer.group = 17;  // three parts
  CHECK(splits(1, 131072, 8192) == 44);
}

TEST_CASE("A workspace is enough for fewer rows and shorter caches") {
  LayerView layer;
  layer.kv_heads = 3;
  layer.group = 5;
  layer.key_dim = 64;
  layer.value_dim = 64;
  for (const std::int64_t compressed : {std::int64_t{0}, std::int64_t{700}, std::int64_t{20000}}) {
    std::int64_t before = 0;
    for (int rows = 1; rows < 700; ++rows) {
      const StepGrid grid = step_grid(layer, rows, compressed, 2000);
      StepWorkspace unused;
      before = std::max(before, lay_out(layer, grid, rows, compressed, 2000, nullptr, unused));
      REQUIRE(before <= step_workspace_bytes(layer, rows, compressed, 2000));
    }
    REQUIRE(step_workspace_bytes(layer, 9, compressed, 1000) <=
            step_workspace_bytes(layer, 9, compressed, 2000));
  }
}

TEST_CASE("Storage types, head sizes and sketches") {
  cpu_device::reset_device();
  std::uint32_t seed = 10;
  struct Dims {
    std::int64_t key, value;
  };
  for (const Dims dims : {Dims{64, 64}, Dims{80, 80}, Dims{96, 128}, Dims{112, 112}, Dims{100, 64},
                          Dims{256, 72}, Dims{30, 7}}) {
    for (const SketchConfig sketch :
         {SketchConfig{SketchKind::calibrated, 2}, SketchConfig{SketchKind::calibrated, 3},
          SketchConfig{SketchKind::calibrated, 4}, SketchConfig{SketchKind::exact, 2}}) {
      Setup setup = small(++seed);
      setup.key_dim = dims.key;
      setup.value_dim = dims.value;
      setup.sketch = sketch;
      setup.storage = seed % 3 == 0 ? DType::f32 : seed % 3 == 1 ? DType::f16 : DType::bf16;
      setup.query_type = seed % 4 == 0 ? DType::f16 : seed % 4 == 1 ? DType::bf16 : DType::f32;
      setup.lengths = {{300 + seed, 290}};
      setup.fetch.epsilon = seed % 2 == 0 ? kOff : 0.3;
      setup.query_size = 2;
      require_equal(setup);
    }
  }
}

TEST_CASE("Groups of query heads") {
  cpu_device::reset_device();
  for (const int group : {1, 3, 4, 7, 12, 17}) {
    Setup setup = small(100 + static_cast<std::uint32_t>(group));
    setup.group = group;
    setup.fetch.epsilon = kOff;
    setup.query_size = 2;
    setup.lengths = {{620, 540}};
    if (group == 12) {  // a warp keeps two columns
      setup.key_dim = 96;
      setup.value_dim = 192;
      setup.storage = DType::bf16;
    }
    if (group == 17) {  // two parts, and more shared memory than needs no permission
      setup.key_dim = 256;
      setup.value_dim = 100;
      setup.storage = DType::f32;
      setup.query_size = 0.5;
      setup.lengths = {{150, 120}};
    }
    require_equal(setup);
  }
}

TEST_CASE("Every query head of a group has its part of the attention, every coordinate a warp") {
  for (int dim = 1; dim <= 576; ++dim) {
    for (int group = 1; group <= 64; ++group) {
      LayerView layer;
      layer.group = group;
      layer.key_dim = layer.value_dim = dim;
      const StepGrid grid = step_grid(layer, 1, 1000, 100);
      const int tiles = (grid.part_heads + kTileHeads - 1) / kTileHeads;
      const int columns = tiles * ((dim + 63) / 64);
      const bool enough = grid.part_heads >= 1 && grid.attention_parts * grid.part_heads >= group &&
                          columns <= grid.warp_columns * kAttentionThreads / 32 &&
                          tiles * grid.units <= kAttentionThreads;
      CAPTURE(dim, group);
      REQUIRE(enough);
      // A host row is read once for these.
      if (dim <= 256 && group <= 16) REQUIRE(grid.attention_parts == 1);
    }
  }
}

// So many rows that each has one split. Logits of some dozens: the largest of the first few hundred
// is seldom that of all.
TEST_CASE("A split of several chunks") {
  cpu_device::reset_device();
  for (const DType storage : {DType::f16, DType::f32}) {
    Setup setup = small(160);
    setup.storage = storage;
    setup.query_size = 30;
    setup.fetch.epsilon = kOff;
    setup.lengths = {{1000, 0}, {1000, 400}};
    setup.slots.assign(512, -1);
    setup.slots[3] = 0;
    setup.slots[4] = 1;
    require_equal(setup);
  }
}

TEST_CASE("The largest heads") {
  cpu_device::reset_device();
  Setup setup = small(150);
  setup.group = 5;
  setup.key_dim = 576;
  setup.value_dim = 576;
  setup.fetch.epsilon = kOff;
  setup.lengths = {{100, 60}};
  setup.query_size = 4;
  REQUIRE(require_equal(setup).moved > 0);
}

TEST_CASE("Sinks of the softmax") {
  cpu_device::reset_device();
  // Below, among and above the logits; a group in two parts, and a sequence without tokens.
  for (const int group : {3, 17}) {
    Setup setup = small(155);
    setup.group = group;
    setup.kv_heads = 2;
    setup.key_dim = group == 17 ? 256 : 64;
    setup.lengths = {{620, 540}, {0, 0}, {40, 0}};
    setup.slots = {0, 1, -1, 2};
    setup.query_size = 2;
    for (int h = 0; h < 2 * group; ++h)
      setup.sink_logits.push_back(static_cast<float>(h % 4 == 3 ? 300 : 4 * (h % 4) - 3));
    const Scene::Totals totals = require_equal(setup);
    setup.sink_logits.clear();
    // A head that gives its attention to the sink asks for less.
    CHECK(require_equal(setup).moved > totals.moved);
  }
}

// Query heads of one KV head, of which some estimate by clusters.
TEST_CASE("Heads whose clusters know nothing beside others") {
  cpu_device::reset_device();
  for (const std::int64_t value_dim : {std::int64_t{64}, std::int64_t{7}}) {
    Setup setup = small(170);
    setup.group = 6;
    setup.value_dim = value_dim;
    setup.key_size = 4;
    setup.fetch.epsilon = kOff;
    setup.lengths = {{900, 850}};
    const auto edit = [&](std::vector<float>& queries) {
      // The sketch of every second head is useless: at logits of hundreds it is off by dozens.
      for (std::size_t i = 0; i < queries.size(); ++i) queries[i] *= i / 64 % 2 == 0 ? 0.1f : 40.0f;
    };
    const Scene::Totals totals = require_equal(setup, edit);
    CHECK(totals.by_clusters >= 3);
    CHECK(totals.by_clusters < 6);
  }
}

// All that clusters know is moved to what the certificate leaves.
TEST_CASE("Clusters that weigh too much or too little") {
  cpu_device::reset_device();
  for (const double epsilon : {0.01, 0.001}) {
    for (const double keep : {0.02, 0.3}) {
      for (const std::int64_t compressed : {60, 64, 65, 700, 9000}) {
        Setup setup = small(180 + static_cast<std::uint32_t>(compressed));
        setup.group = 1;
        setup.key_dim = 32;
        setup.value_dim = 8;
        setup.keep = keep;
        setup.query_size = 2;
        setup.fetch.epsilon = epsilon;
        setup.fetch.limit_tokens = 40;
        setup.lengths = {{compressed + 10, compressed}};
        require_equal(setup);
      }
    }
  }
}

TEST_CASE("The threshold of the certificate") {
  cpu_device::reset_device();
  std::uint32_t seed = 200;
  Scene::Totals all;
  for (const double epsilon : {0.5, 0.3, 0.1, 0.02}) {
    for (const double query_size : {0.3, 1.0, 4.0}) {
      Setup setup = small(++seed);
      setup.fetch.epsilon = epsilon;
      setup.fetch.risk = seed % 2 == 0 ? kOff : 1e-4;
      setup.query_size = query_size;
      setup.keep = seed % 3 == 0 ? 0.02 : 0.2;
      setup.lengths = {{900, 850}};
      const Scene::Totals totals = require_equal(setup);
      all.searched += totals.searched;
      all.fetched += totals.fetched;
      all.moved += totals.moved;
      all.uncertified += totals.uncertified;
    }
  }
  // Long enough that most of the list leaves it by rounds.
  Setup setup = small(++seed);
  setup.group = 1;
  setup.fetch.epsilon = 0.1;
  setup.lengths = {{2900, 2800}};
  REQUIRE(require_equal(setup).searched > 0);
  REQUIRE(all.searched >= 6);
  REQUIRE(all.moved > 100);
  REQUIRE(all.fetched > all.moved);
  REQUIRE(all.uncertified == 0);
}

TEST_CASE("Equal keys tie") {
  cpu_device::reset_device();
  std::uint32_t seed = 300;
  for (const double epsilon : {0.3, 0.2, 0.1, 0.05}) {
    for (const bool equal_odds : {true, false}) {
      Setup setup = small(++seed);
      setup.equal_keys = true;
      setup.equal_odds = equal_odds;
      setup.fetch.epsilon = epsilon;
      setup.fetch.risk = kOff;
      setup.fetch.probability = epsilon < 0.25 ? 0.0015 : kOff;
      setup.lengths = {{360, 350}};
      CAPTURE(epsilon, equal_odds);
      REQUIRE(require_equal(setup).searched > 0);
    }
  }
}

TEST_CASE("Rules, modes and limits") {
  cpu_device::reset_device();
  Setup setup = small(400);
  setup.query_size = 2;
  SECTION("probability") {
    setup.fetch.epsilon = kOff;
    setup.fetch.risk = kOff;
    setup.fetch.probability = 0.003;
    REQUIRE(require_equal(setup).moved > 0);
  }
  SECTION("probability and certificate") {
    setup.fetch.epsilon = 0.1;
    setup.fetch.probability = 0.003;
    setup.lengths = {{600, 560}};
    REQUIRE(require_equal(setup).moved > 0);
  }
  SECTION("no rule") {
    setup.fetch.epsilon = kOff;
    setup.fetch.risk = kOff;
    REQUIRE(require_equal(setup).fetched == 0);
  }
  SECTION("never") {
    setup.fetch.mode = FetchMode::never;
    REQUIRE(require_equal(setup).fetched == 0);
  }
  SECTION("always") {
    setup.fetch.mode = FetchMode::always;
    REQUIRE(require_equal(setup).fetched > 1000);
  }
  SECTION("always, limited") {
    setup.fetch.mode = FetchMode::always;
    setup.fetch.limit_tokens = 37;
    REQUIRE(require_equal(setup).fetched == 37);
  }
  SECTION("risk, limited") {
    setup.fetch.epsilon = kOff;
    setup.fetch.risk = 1e-6;
    setup.fetch.limit_tokens = 11;
    REQUIRE(require_equal(setup).fetched == 11);
  }
  SECTION("limited among ties") {
    setup.fetch.mode = FetchMode::always;
    setup.equal_keys = true;
    setup.fetch.limit_tokens = 150;
    REQUIRE(require_equal(setup).fetched == 150);
  }
  SECTION("no cap") {
    setup.fetch.cap = std::numeric_limits<float>::infinity();
    setup.fetch.epsilon = kOff;
    require_equal(setup);
  }
}

TEST_CASE("A ragged batch with padding, an empty cache and one that is not compressed") {
  cpu_device::reset_device();
  Setup setup = small(500);
  setup.kv_heads = 2;
  setup.fetch.epsilon = kOff;
  setup.query_gap = 3;
  setup.lengths = {{0, 0}, {1, 0}, {523, 0}, {40, 17}, {1100, 1060}, {560, 512}, {33, 33}};
  setup.slots = {4, -1, 0, 2, 6, 1, 3, 5};
  require_equal(setup);
}

TEST_CASE("Rows that do not see the newest tokens") {
  cpu_device::reset_device();
  Setup setup = small(500);
  setup.kv_heads = 2;
  setup.lengths = {{560, 512}, {40, 17}, {5, 0}};
  setup.slots = {0, 0, 0, -1, 1, 1, 2, 2};
  setup.back = {3, 1, 0, 0, 22, 0, 4, 1};
  require_equal(setup);
}

TEST_CASE("Extreme logits") {
  cpu_device::reset_device();
  Setup setup = small(600);
  setup.lengths = {{600, 560}};
  setup.fetch.epsilon = kOff;
  SECTION("large") {
    setup.query_size = 100;
    require_equal(setup);
  }
  SECTION("larger, in bfloat16") {
    setup.query_size = 1e4;
    setup.key_size = 30;
    setup.storage = DType::bf16;
    require_equal(setup);
  }
  SECTION("tiny") {
    setup.query_size = 1e-30;
    require_equal(setup);
  }
  SECTION("zero") {
    require_equal(setup, [](std::vector<float>& q) { q.assign(q.size(), 0.0f); });
  }
  SECTION("overflow") {
    setup.storage = DType::f32;
    setup.key_size = 1e18;
    require_equal(setup, [](std::vector<float>& q) {
      for (float& x : q) x *= 1e25f;
    });
  }
  SECTION("one head overflows") {
    setup.storage = DType::f32;
    setup.key_size = 1e18;
    require_equal(setup, [](std::vector<float>& q) {
      for (std::size_t i = 0; i < q.size(); ++i) q[i] *= i < 64 ? 1e25f : 1e-18f;
    });
  }
  SECTION("residents far below the plan's shift") {
    setup.key_size = 10;
    setup.query_size = 4;
    setup.keep = 0.02;
    setup.fetch.mode = FetchMode::never;
    setup.lengths = {{600, 600}};
    require_equal(setup);
  }
  SECTION("a sketch far off") {
    // At logits of some hundreds the error of 2 bits is some dozens.
    setup.key_size = 10;
    setup.query_size = 20;
    require_equal(setup);
  }
}

// The last group of the sketch is padded, and what pads it must not count.
TEST_CASE("Few compressed tokens, and a last group of few") {
  cpu_device::reset_device();
  for (const std::int64_t compressed : {1, 2, 5, 7, 9, 17, 18, 31, 33}) {
    for (std::uint32_t seed = 1; seed <= 8; ++seed) {
      Setup setup;
      setup.kv_heads = 1;
      setup.key_dim = setup.value_dim = 64;
      setup.storage = DType::f32;
      setup.lengths = {{compressed, compressed}};
      setup.seed = seed;
      require_equal(setup);
    }
  }
}

// Coefficients of drawn tokens are added to logits as logarithms: of some hundreds they must not
// swallow them.
TEST_CASE("Outputs where all logits are large") {
  cpu_device::reset_device();
  for (std::uint32_t seed = 1; seed <= 16; ++seed) {
    Setup setup;
    setup.kv_heads = setup.group = 1;
    setup.key_dim = 64;
    setup.value_dim = 16;
    setup.storage = DType::f32;
    setup.sketch.bits = 4;
    setup.equal_keys = setup.equal_odds = true;
    setup.key_size = 30;
    setup.query_size = 150;
    setup.lengths = {{300, 300}};
    setup.fetch.epsilon = setup.fetch.risk = kOff;
    setup.seed = seed;
    require_equal(setup);
  }
}

TEST_CASE("Soft-capped logits") {
  cpu_device::reset_device();
  for (std::uint32_t seed : {700u, 701u, 702u, 703u}) {
    Setup setup = small(seed);
    setup.soft_cap = seed == 700 ? 5 : 20;
    setup.query_size = seed == 701 ? 10 : 3;
    setup.fetch.epsilon = 0.2;
    setup.lengths = {{600, 560}};
    setup.sketch.kind = seed == 702 ? SketchKind::exact : SketchKind::calibrated;
    require_equal(setup);
  }
}

TEST_CASE("A step of a long cache has several splits") {
  cpu_device::reset_device();
  Setup setup = small(800);
  setup.group = 1;
  setup.fetch.epsilon = kOff;
  setup.query_size = 3;
  setup.lengths = {{6000, 5900}};
  REQUIRE(require_equal(setup).moved > 20);
}

// More blocks of 512 than a multiprocessor's shared memory holds sums of.
// More blocks of 512 than half warps: lists grow over rounds.
TEST_CASE("Limited fetches from a long cache") {
  cpu_device::reset_device();
  for (const bool equal : {false, true}) {
    Setup setup = small(870);
    setup.group = 1;
    setup.key_dim = 16;
    setup.value_dim = 4;
    setup.equal_keys = equal;
    setup.equal_odds = equal;
    setup.fetch.mode = FetchMode::always;
    setup.fetch.limit_tokens = 9000;
    setup.lengths = {{17500, 17450}};
    REQUIRE(require_equal(setup).fetched == 9000);
  }
}

TEST_CASE("A million tokens") {
  cpu_device::DeviceOptions options;
  options.machine.check_races = false;
  cpu_device::reset_device(options);
  Setup setup = small(850);
  setup.group = 1;
  setup.key_dim = 16;
  setup.value_dim = 4;
  setup.keep = 0.002;
  setup.fetch.mode = FetchMode::never;
  setup.lengths = {{(1 << 20) + 700, (1 << 20) + 650}};
  require_equal(setup);
}

TEST_CASE("Results do not depend on the order of threads and blocks") {
  for (const std::uint64_t order : {std::uint64_t{1}, std::uint64_t{2}}) {
    cpu_device::DeviceOptions options;
    options.machine.thread_order = order;
    options.machine.block_order = order;
    cpu_device::reset_device(options);
    Setup setup = small(900);
    setup.fetch.epsilon = 0.1;
    setup.fetch.limit_tokens = 200;
    setup.lengths = {{700, 650}};
    require_equal(setup);
  }
}

TEST_CASE("Instructions that are a few units off") {
  cpu_device::DeviceOptions options;
  options.machine.approximate_ulps = 4;
  cpu_device::reset_device(options);
  for (const DType storage : {DType::f16, DType::bf16, DType::f32}) {
    Setup setup = small(950);
    setup.storage = storage;
    setup.query_size = 2;
    setup.fetch.epsilon = kOff;
    setup.lengths = {{700, 650}};
    REQUIRE(require_equal(setup).moved > 0);
  }
}

// The certificate's quotients come from approximate reciprocals, and must be those of a division;
// weights too small for that are divided.
TEST_CASE("Results do not depend on the last places of a reciprocal") {
  for (const unsigned ulps : {1u, 2u}) {
    cpu_device::DeviceOptions options;
    options.machine.approximate_ulps = ulps;
    cpu_device::reset_device(options);
    for (const double query_size : {1.0, 4.0, 20.0}) {
      for (const double epsilon : {0.1, kOff}) {
        Setup setup = small(950 + ulps);
        setup.fetch.epsilon = epsilon;
        setup.query_size = query_size;
        setup.key_size = query_size;
        require_equal(setup);
      }
    }
  }
}

TEST_CASE("A captured step sees lengths that changed since") {
  cpu_device::reset_device();
  Setup setup = small(1000);
  setup.fetch.epsilon = kOff;
  setup.lengths = {{560, 530}, {100, 0}};
  setup.slots = {1, 0};
  Scene scene(setup);
  scene.reserve(20);
  scene.draw_queries();
  scene.upload();
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  scene.launch(stream);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (int step = 0; step < 3; ++step) {
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    const std::string wrong = scene.compare();
    REQUIRE(first_fault() == "");
    REQUIRE(wrong == "");
    scene.append(step % 2, 7);
    scene.draw_queries();
  }
  REQUIRE(cudaGraphExecDestroy(exec) == cudaSuccess);
  REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
}
