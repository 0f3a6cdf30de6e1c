// LayerStore against the CPU's HeadStore: rows of both tiers, codes, scales, odds, clusters,
// places, drawn tokens and window scores are equal bit for bit after every operation, and after one
// that found no memory.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <verkv/clusters.hpp>
#include <verkv/error.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/sketch.hpp>

#include "catch.hpp"
#include "cpu/head_store.hpp"
#include "cudart.hpp"
#include "mutation.hpp"
#include "reference/statistics.hpp"
#include "store.hpp"
#include "support/flat_head.hpp"

namespace {

using verkv::BFloat16;
using verkv::DrawId;
using verkv::DType;
using verkv::Half;
using verkv::HeadCompression;
using verkv::MemoryReport;
using verkv::Positive16;
using verkv::Selection;
using verkv::SketchConfig;
using verkv::SketchKind;
using verkv::TensorView;
using verkv::cpu::HeadStore;
using verkv::cpu::LayerShape;
using verkv::cuda::AppendArguments;
using verkv::cuda::BadNumber;
using verkv::cuda::DeviceBuffer;
using verkv::cuda::HeadView;
using verkv::cuda::LayerStore;
using verkv::cuda::LayerView;
using verkv::reference::Random;
namespace device = verkv::cpu_device;

// Part of the kernel's name.
constexpr const char* kEncode = "encode_kernel";

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <class T>
std::vector<T> download(const T* from, std::int64_t count) {
  std::vector<T> result(size(count));
  if (count > 0) {
    VERKV_CUDA_CHECK(
        cudaMemcpy(result.data(), from, result.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
  return result;
}

template <class T>
DeviceBuffer<T> upload(const std::vector<T>& values) {
  DeviceBuffer<T> buffer(static_cast<std::int64_t>(values.size()), "test data");
  VERKV_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}

template <class A, class B>
bool same_bytes(const A* a, const B* b, std::int64_t count) {
  static_assert(sizeof(A) == sizeof(B));
  return count == 0 || std::memcmp(a, b, size(count) * sizeof(A)) == 0;
}

struct Setup {
  std::int64_t kv_heads = 2;
  std::int64_t key_dim = 128;
  std::int64_t value_dim = 128;
  DType storage = DType::f16;
  DType given = DType::f32;  // of the appended views
  SketchConfig sketch;
  bool uneven = false;  // channels of very different size
  bool head_major = false;
  Selection select = Selection::poisson;
  bool clusters = true;
};

// The same layer on both sides.
struct Pair {
  explicit Pair(const Setup& given_setup, std::uint64_t seed) : setup(given_setup), random(seed) {
    shape.config.kv_heads = setup.kv_heads;
    shape.config.query_heads = setup.kv_heads;
    shape.config.key_dim = setup.key_dim;
    shape.config.value_dim = setup.value_dim;
    shape.storage = setup.storage;
    shape.clusters = setup.clusters;
    shape.sketch = verkv::largest_sketch_shape(setup.sketch.kind, setup.sketch.bits,
                                               static_cast<int>(setup.key_dim));
    layer.kv_heads = static_cast<int>(setup.kv_heads);
    layer.key_dim = static_cast<int>(setup.key_dim);
    layer.value_dim = static_cast<int>(setup.value_dim);
    layer.storage = setup.storage;
    layer.sketch = shape.sketch;
    layer.clusters = setup.clusters;
    for (std::int64_t h = 0; h < setup.kv_heads; ++h) heads.emplace_back(shape);
    table = DeviceBuffer<HeadView>(setup.kv_heads, "table");
    bad = upload(std::vector<BadNumber>(1));
    store = std::make_unique<LayerStore>(layer);
    store->write_table(table.data(), nullptr);
  }

  // The tokens in the given type, with gaps between the rows.
  std::vector<std::byte> block(std::int64_t tokens, std::int64_t dim, TensorView& out_view) {
    const std::int64_t element = static_cast<std::int64_t>(verkv::size_bytes(setup.given));
    const std::int64_t row = dim + 3;
    std::vector<std::byte> data(size(tokens * setup.kv_heads * row * element));
    for (std::int64_t i = 0; i < tokens * setup.kv_heads * row; ++i) {
      float x = static_cast<float>(random.normal());
      if (setup.uneven) x *= std::exp2(-static_cast<float>(i % row % 16));
      if (random.below(50) == 0) x = 0;
      if (random.below(200) == 0) x *= 1e-6f;
      if (setup.given == DType::f32) std::memcpy(&data[size(4 * i)], &x, 4);
      const Half half = verkv::to_half(x);
      const BFloat16 brain = verkv::to_bfloat16(x);
      if (setup.given == DType::f16) std::memcpy(&data[size(2 * i)], &half, 2);
      if (setup.given == DType::bf16) std::memcpy(&data[size(2 * i)], &brain, 2);
    }
    out_view = {data.data(), setup.given, tokens, setup.kv_heads, dim, row * setup.kv_heads, row};
    if (setup.head_major) {
      out_view.token_stride = row;
      out_view.head_stride = row * tokens;
    }
    return data;
  }

  void reserve(std::int64_t tokens) {
    for (HeadStore& head : heads) {
      head.window_scores().settle();
      head.reserve_append(tokens, true);
    }
    store->settle(table.data(), nullptr);
    store->reserve_append(tokens, true, table.data(), nullptr);
  }

  // reserved: there is room already, and what queries gave is taken in on the way.
  void append(std::int64_t tokens, bool counts, bool reserved = false) {
    TensorView keys;
    TensorView values;
    const std::vector<std::byte> key_data = block(tokens, setup.key_dim, keys);
    const std::vector<std::byte> value_data = block(tokens, setup.value_dim, values);
    if (!reserved) reserve(tokens);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      heads[h].append(shape, verkv::cpu::scalar_kernels(), keys, values,
                      static_cast<std::int64_t>(h), true);
    }
    const DeviceBuffer<std::byte> key_copy = upload(key_data);
    const DeviceBuffer<std::byte> value_copy = upload(value_data);
    AppendArguments step;
    step.keys = keys;
    step.keys.data = key_copy.data();
    step.values = values;
    step.values.data = value_copy.data();
    step.bad = bad.data();
    store->append_rows(step, 0, counts, table.data(), nullptr);
    store->add_tokens(tokens);
    if (!counts) store->write_table(table.data(), nullptr);
    VERKV_CUDA_CHECK(cudaStreamSynchronize(nullptr));
  }

  // What differs after allocations were refused, each in turn; empty if that changed nothing. Then
  // it compresses.
  std::string compress(std::int64_t end, const DrawId& draw, bool refuse = false) {
    store->settle(table.data(), nullptr);
    for (HeadStore& head : heads) head.window_scores().settle();
    std::vector<HeadCompression> compressions = plan_compression(end, draw);
    std::string changed;
    refused = refuse;
    device::Device& machine = device::current_device();
    for (int skip = 0; refuse && changed.empty(); ++skip) {
      std::vector<HeadCompression> copies = compressions;
      machine.fail_call(device::Call::malloc, device::Status::out_of_memory, skip);
      try {
        (void)store->compress(copies, 10, table.data(), nullptr);
        machine.stop_failing();
        break;  // the change is dropped
      } catch (const verkv::DeviceError&) {
        ++refusals;
      }
      // The table names matrices of the compression, which nobody reads any more.
      store->write_table(table.data(), nullptr);
      changed = difference();
    }
    store->write_table(table.data(), nullptr);
    if (changed.empty()) changed = difference();
    refused = false;
    for (std::size_t h = 0; h < heads.size(); ++h) compress_on_cpu(h, end, compressions[h]);
    LayerStore::Change change = store->compress(compressions, 10, table.data(), nullptr);
    store->take(std::move(change), table.data(), nullptr);
    return changed;
  }

  void compress_on_cpu(std::size_t h, std::int64_t end, const HeadCompression& head) {
    std::vector<float> scratch(2 * size(setup.key_dim) + 32);
    HeadCompression copy = head;
    REQUIRE(copy.end() == end);
    std::optional<verkv::cpu::Window> window = heads[h].reserve_compress(
        shape, copy.basis.query.empty() ? heads[h].sketch(shape) : copy.basis.shape, copy, 0);
    heads[h].compress(shape, verkv::cpu::scalar_kernels(), copy, std::move(window), scratch);
  }

  // The clusters that have a place from `begin` on, where `more` follows what is there.
  verkv::Clusters clusters(std::size_t h, std::int64_t begin, const HeadCompression& more) const {
    const std::int64_t from = begin / verkv::kClusterTokens * verkv::kClusterTokens;
    const std::vector<std::uint32_t> before = heads[h].order().position;
    std::vector<std::uint32_t> position(before.begin() + from, before.end());
    position.insert(position.end(), more.order.position.begin(), more.order.position.end());
    return verkv::make_clusters(heads[h].host().values(shape), position, odds(h, from, more));
  }

  // Odds from place `from` on, likewise.
  std::vector<Positive16> odds(std::size_t h, std::int64_t from,
                               const HeadCompression& more) const {
    const std::vector<Positive16> own = heads[h].all_odds();
    std::vector<Positive16> result(own.begin() + from, own.end());
    result.insert(result.end(), more.odds.begin(), more.odds.end());
    return result;
  }

  std::vector<HeadCompression> plan_compression(std::int64_t end, const DrawId& draw) {
    const std::int64_t count = end - store->compressed();
    std::vector<HeadCompression> compressions(heads.size());
    for (HeadCompression& head : compressions) {
      head.begin = store->compressed();
      for (std::int64_t i = 0; i < count; ++i) {
        const std::size_t kind = random.below(10);
        head.odds.push_back(verkv::stored_odds(kind == 0   ? 1.0
                                               : kind == 1 ? 0.0
                                                           : random.uniform()));
      }
      head.first_tokens = static_cast<std::int64_t>(head.odds.size() / 2 + 1);
    }
    for (std::size_t h = 0; h < heads.size(); ++h) {
      HeadCompression& head = compressions[h];
      if (setup.sketch.kind != SketchKind::exact && store->compressed() == 0) {
        // Keys of one channel that outweighs the others, and queries that look elsewhere.
        std::vector<float> queries;
        for (std::int64_t i = 0; i < 5 * setup.key_dim; ++i)
          queries.push_back(static_cast<float>(random.normal()));
        head.basis = verkv::make_basis(setup.sketch.bits, heads[h].host().keys(shape), head.odds,
                                       nullptr, queries, 7);
      }
      const verkv::Rows keys = store->host_keys(static_cast<std::int64_t>(h));
      const verkv::Rows values = store->host_values(static_cast<std::int64_t>(h));
      verkv::OrderDirections& directions = head.order.directions;
      directions = store->directions(static_cast<std::int64_t>(h));
      if (directions.key.empty()) {
        directions.key = verkv::order_directions(keys, head.odds, nullptr, 8, 1);
        directions.value = verkv::order_directions(values, head.odds, nullptr, 4, 0.5);
      }
      verkv::add_places(head.order, keys, values, head.begin, count, 40);
      moved_places += !std::is_sorted(head.order.position.begin(), head.order.position.end());
      head.odds = verkv::odds_by_place(head.odds, head.begin, head.order);
      head.drawn =
          verkv::draw_places(name(draw, h), setup.select, head.odds, head.begin, head.order);
      if (!setup.clusters) continue;
      head.clusters = clusters(h, head.begin, head);
      head.order.open_odds = odds(h, 0, head);
      head.order.open_odds.erase(
          head.order.open_odds.begin(),
          head.order.open_odds.begin() + end / verkv::kClusterTokens * verkv::kClusterTokens);
    }
    return compressions;
  }

  static DrawId name(DrawId draw, std::size_t head) {
    draw.kv_head += static_cast<std::uint32_t>(head);
    return draw;
  }

  void redraw(const DrawId& draw) {
    std::vector<LayerStore::Places> drawn;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::int64_t head = static_cast<std::int64_t>(h);
      drawn.push_back(verkv::draw_places(name(draw, h), setup.select, store->odds(head, nullptr), 0,
                                         store->order(head)));
      heads[h].take(heads[h].redraw(shape, drawn.back()));
    }
    LayerStore::Change change = store->redraw(drawn, 5, table.data(), nullptr);
    store->take(std::move(change), table.data(), nullptr);
  }

  // What the queries of the last append give.
  void score_window() {
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadView view = store->views()[h];
      for (std::int64_t position = view.first_scored; position < view.tokens; ++position) {
        if (random.below(4) == 0) continue;
        const std::int64_t window = position + 1 - view.compressed;
        std::vector<float> given;
        for (std::int64_t i = 0; i < window; ++i)
          given.push_back(static_cast<float>(random.uniform()));
        std::copy(given.begin(), given.end(), heads[h].window_scores().given_by(window));
        heads[h].window_scores().has_given(window, true);
        const std::int64_t row = position - view.first_scored;
        const std::uint32_t yes = 1;
        VERKV_CUDA_CHECK(cudaMemcpy(view.given + row * view.given_stride, given.data(),
                                    4 * given.size(), cudaMemcpyHostToDevice));
        VERKV_CUDA_CHECK(cudaMemcpy(view.has_given + row, &yes, 4, cudaMemcpyHostToDevice));
        ++given_rows;
      }
    }
  }

  void truncate(std::int64_t tokens) {
    for (HeadStore& head : heads) head.truncate(tokens);
    store->truncate(tokens, table.data(), nullptr);
  }

  // What differs first; empty if nothing.
  std::string difference() const {
    const std::vector<HeadView> entries = download(table.data(), setup.kv_heads);
    const std::int64_t element = static_cast<std::int64_t>(verkv::size_bytes(setup.storage));
    std::vector<float> scores;
    const std::int64_t window = store->tokens() - store->compressed();
    if (window > 0) scores = store->window_scores(window, nullptr);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadStore& head = heads[h];
      const verkv::test::FlatHead flat = verkv::test::flat(head, shape);
      const HeadView& view = entries[h];
      const std::string where = "head " + std::to_string(h) + ": ";
      if (std::memcmp(&view, &store->views()[h], sizeof view) != 0) return where + "table";
      if (view.tokens != head.tokens() || view.compressed != head.compressed()) {
        return where + "lengths";
      }
      if (view.drawn != head.drawn_residents()) return where + "drawn";
      const auto place = download(view.resident_place, view.residents());
      if (place != flat.resident_places) return where + "resident places";
      const std::int64_t n = view.residents();
      const auto keys = download(view.resident_keys, n * setup.key_dim * element);
      const auto values = download(view.resident_values, n * setup.value_dim * element);
      if (keys != flat.resident_keys) return where + "resident keys";
      if (values != flat.resident_values) return where + "resident values";
      // Pinned memory has the same address on both sides of the CPU device.
      if (!same_bytes(view.host_rows, flat.host_rows.data(), view.tokens * shape.row_bytes())) {
        return where + "host rows";
      }
      const verkv::HeadOrder order = store->order(static_cast<std::int64_t>(h));
      const verkv::HeadOrder own = head.order();
      const verkv::HeadRows told = head.rows(shape);
      if (order.position != own.position || order.walk_end != own.walk_end ||
          order.directions.key != own.directions.key ||
          order.directions.value != own.directions.value ||
          order.open_odds.size() != told.open_odds.size() ||
          !same_bytes(order.open_odds.data(), told.open_odds.data(),
                      static_cast<std::int64_t>(told.open_odds.size()))) {
        return where + "order";
      }
      if (!same_bytes(view.place_position, order.position.data(), view.compressed)) {
        return where + "positions of places";
      }
      const std::int64_t end = view.compressed;
      if (!same_bytes(download(view.odds, end).data(), flat.odds.data(), end))
        return where + "odds";
      const verkv::Clusters made = setup.clusters ? clusters(h, 0, {}) : verkv::Clusters();
      const std::int64_t mean_bytes = static_cast<std::int64_t>(made.centroids.size());
      if (!same_bytes(download(view.centroids, mean_bytes).data(), made.centroids.data(),
                      mean_bytes) ||
          flat.centroids != made.centroids) {
        return where + "centroids";
      }
      const std::int64_t made_clusters = static_cast<std::int64_t>(made.spread.size());
      if (flat.spreads.size() != made.spread.size() ||
          !same_bytes(download(view.spreads, made_clusters).data(), made.spread.data(),
                      made_clusters) ||
          !same_bytes(flat.spreads.data(), made.spread.data(), made_clusters)) {
        return where + "spreads";
      }
      if (setup.sketch.kind != SketchKind::exact && end > 0) {
        const std::int64_t coded = refused ? end / verkv::kSketchGroup * verkv::kSketchGroup : end;
        const std::int64_t bytes = verkv::code_storage_bytes(head.sketch(shape), coded);
        if (!same_bytes(download(view.codes, bytes).data(), flat.codes.data(), bytes)) {
          return where + "codes";
        }
        if (!same_bytes(download(view.scales, end).data(), flat.scales.data(), end)) {
          return where + "scales";
        }
        if (!same_bytes(download(view.channel_means, setup.key_dim).data(),
                        flat.channel_means.data(), setup.key_dim)) {
          return where + "means";
        }
      }
      for (std::int64_t i = 0; i < window; ++i) {
        if (scores[h * size(window) + size(i)] != head.window_scores().score(i))
          return where + "scores";
      }
    }
    return "";
  }

  Setup setup;
  Random random;
  LayerShape shape;
  LayerView layer;
  std::vector<HeadStore> heads;
  DeviceBuffer<HeadView> table;
  DeviceBuffer<BadNumber> bad;
  std::unique_ptr<LayerStore> store;
  int refusals = 0;
  // Since a compression that did not take effect: what pads the last group of codes is its.
  bool refused = false;
  std::int64_t given_rows = 0;
  std::int64_t moved_places = 0;  // compressions whose places are in another order than positions
};

// A life of a sequence's layer, compared after each operation.
void live(const Setup& setup, std::uint64_t seed) {
  Pair pair(setup, seed);
  DrawId key{7, seed, 3, 5};
  const auto check = [&](const char* what) {
    INFO(what);
    REQUIRE(pair.difference() == "");
    INFO((device::current_device().faults().empty()
              ? ""
              : device::current_device().faults().front().what()));
    REQUIRE(device::current_device().faults().empty());
  };
  Random random(seed);
  pair.append(37 + static_cast<std::int64_t>(random.below(60)), true);
  check("first append");
  pair.append(1, false);
  check("one token");
  pair.compress(20 + static_cast<std::int64_t>(random.below(17)), key);
  check("first compression");
  pair.score_window();
  pair.append(3, true);
  pair.score_window();
  check("window scores");
  pair.append(70, true);
  check("growth");
  pair.reserve(40);
  pair.append(5, true, true);
  pair.score_window();
  check("reserved");
  pair.append(33, true, true);
  check("taken in on the way");
  pair.score_window();
  pair.truncate(pair.store->tokens() - 20);
  check("back within the last append");
  pair.score_window();
  pair.append(2, true, true);
  pair.truncate(pair.store->tokens() - 20);
  check("back behind it");
  pair.append(1, true);
  REQUIRE(pair.compress(pair.store->compressed() + 1 + static_cast<std::int64_t>(random.below(30)),
                        key, true) == "");
  check("second compression");
  key.sequence += 1;
  pair.redraw(key);
  check("redraw");
  pair.append(2, true);
  pair.compress(pair.store->tokens(), key);
  check("everything compressed");
  pair.append(1, true);
  check("one more");
  REQUIRE(pair.moved_places > 0);
  REQUIRE(pair.refusals > 5);
  REQUIRE(pair.given_rows > 20);
}

std::vector<Setup> setups() {
  std::vector<Setup> all;
  Setup s;
  all.push_back(s);
  s.sketch.bits = 3;
  s.storage = DType::bf16;
  all.push_back(s);
  s.sketch.bits = 4;
  s.storage = DType::f32;
  s.given = DType::f16;
  all.push_back(s);
  s = {};
  s.key_dim = 80;
  s.value_dim = 112;
  s.given = DType::bf16;
  s.head_major = true;
  all.push_back(s);
  s.key_dim = 96;
  s.value_dim = 64;
  s.sketch.bits = 3;
  all.push_back(s);
  s.sketch.bits = 2;
  s.storage = DType::bf16;
  all.push_back(s);
  s.key_dim = 33;
  s.value_dim = 7;
  s.kv_heads = 3;
  all.push_back(s);
  s.sketch.bits = 3;
  all.push_back(s);
  s.sketch = {SketchKind::exact, 2};
  all.push_back(s);
  s = {};
  s.kv_heads = 1;
  s.key_dim = 256;
  s.value_dim = 256;
  all.push_back(s);
  s.key_dim = 512;
  s.value_dim = 1;
  s.sketch.bits = 4;
  all.push_back(s);
  s.key_dim = 1;
  s.value_dim = 512;
  s.sketch.bits = 2;
  all.push_back(s);
  s = {};
  s.key_dim = 100;
  s.sketch.bits = 3;
  all.push_back(s);
  s = {};
  s.key_dim = 256;
  s.uneven = true;
  all.push_back(s);
  return all;
}

}  // namespace

TEST_CASE("the device's store equals the CPU's") {
  std::uint64_t seed = 100;
  for (const Setup& setup : setups()) {
    CAPTURE(seed, setup.key_dim, setup.value_dim, setup.sketch.bits);
    device::reset_device();
    Setup own = setup;
    own.select = seed % 2 == 0 ? Selection::spread : Selection::poisson;
    own.clusters = seed % 4 != 3;
    live(own, seed++);
  }
}

TEST_CASE("the device's store does not depend on the order of threads, blocks and queued work") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    device::DeviceOptions options;
    options.machine.thread_order = seed;
    options.machine.block_order = seed;
    options.schedule_seed = seed;
    device::reset_device(options);
    Setup setup;
    setup.key_dim = 96;
    setup.sketch.bits = seed % 2 == 0 ? 3 : 2;
    live(setup, seed);
  }
}

TEST_CASE("bad numbers are described") {
  device::reset_device();
  Setup setup;
  setup.key_dim = 16;
  setup.value_dim = 8;
  Pair pair(setup, 1);
  std::vector<float> keys(2 * 2 * 16, 1.0f);
  std::vector<float> values(2 * 2 * 8, 1.0f);
  values[2 * 8 + 8 + 5] = 65536.0f;  // token 1, head 1
  const DeviceBuffer<float> key_copy = upload(keys);
  const DeviceBuffer<float> value_copy = upload(values);
  AppendArguments step;
  step.keys = verkv::token_major(key_copy.data(), DType::f32, 2, 2, 16);
  step.values = verkv::token_major(value_copy.data(), DType::f32, 2, 2, 8);
  step.bad = pair.bad.data();
  step.sequence = 9;
  step.layer_index = 4;
  pair.store->reserve_append(2, false, pair.table.data(), nullptr);
  pair.store->append_rows(step, 0, true, pair.table.data(), nullptr);
  const BadNumber bad = download(pair.bad.data(), 1)[0];
  REQUIRE(bad.claimed == 1);
  REQUIRE(bad.source == verkv::cuda::NumberSource::values);
  REQUIRE(bad.sequence == 9);
  REQUIRE(bad.layer == 4);
  REQUIRE(bad.token == 1);
  REQUIRE(bad.head == 1);
  REQUIRE(bad.coordinate == 5);
  REQUIRE(bad.number == 65536.0f);
}

// Every barrier in the kernels is needed: without it a race is reported.
TEST_CASE("no barrier can be left out of encoding") {
  const std::string ptx = device::ptx_of("compress.cu");
  REQUIRE(!ptx.empty());
  Setup setup;
  setup.key_dim = 80;
  setup.value_dim = 16;
  // The keys' side of the bases is on the device only while tokens are encoded.
  std::vector<DeviceBuffer<float>> encode_copies;
  std::vector<DeviceBuffer<std::uint32_t>> position_copies;
  // Whether something was noticed.
  const auto noticed = [&](const std::string& code) {
    device::Device& machine = device::reset_device();
    Pair pair(setup, 5);
    pair.append(64, true);
    pair.compress(32, {7, 1, 0, 0});
    REQUIRE(machine.faults().empty());
    std::vector<HeadView> views(pair.store->views().begin(), pair.store->views().end());
    encode_copies.clear();
    position_copies.clear();
    for (std::size_t h = 0; h < views.size(); ++h) {
      // Places of the window, last token first.
      std::vector<std::uint32_t> position =
          pair.store->order(static_cast<std::int64_t>(h)).position;
      for (std::uint32_t i = 64; i > 32; --i) position.push_back(i - 1);
      position_copies.push_back(upload(position));
      views[h].place_position = position_copies.back().data();
      encode_copies.push_back(upload(pair.heads[h].basis().sketch.encode));
      views[h].basis_encode = encode_copies.back().data();
    }
    const DeviceBuffer<HeadView> table = upload(views);
    const auto module = machine.load(code);
    const int stride = 81;
    const std::size_t shared = 16 * (size(stride) * 4 + size(pair.layer.sketch.code_bytes()));
    const device::Status status = machine.launch_with(
        module->find(kEncode), {{1, 1, 1}, {128, 1, 1}, shared}, device::kLegacyStream, pair.layer,
        static_cast<const HeadView*>(table.data()), std::int64_t{64}, stride);
    REQUIRE((status == device::Status::success || !machine.faults().empty()));
    return machine.synchronize() != device::Status::success;
  };

  REQUIRE(!noticed(ptx));
  std::size_t mutants = 0;
  for (const device::Mutant& mutant : device::without_one_barrier(ptx, kEncode, true)) {
    CAPTURE(mutant.what);
    CHECK(noticed(mutant.ptx));
    ++mutants;
  }
  REQUIRE(mutants >= 3);
}
