#include "step_support.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include <verkv/clusters.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/sketch_error.hpp>

#include "compression.hpp"
#include "support/flat_head.hpp"
#include "tolerance.hpp"

namespace verkv::cuda::test {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Any order will do; in this one hardly a place is its position.
HeadOrder shuffled(std::int64_t count, std::uint64_t seed) {
  HeadOrder order;
  order.position.resize(index(count));
  std::iota(order.position.begin(), order.position.end(), 0u);
  std::shuffle(order.position.begin(), order.position.end(), std::mt19937_64(seed));
  order.walk_end = {static_cast<std::uint32_t>(count)};
  return order;
}

}  // namespace

Scene::Scene(const Setup& setup) : setup_(setup), random_(setup.seed) {
  LayerConfig& c = shape_.config;
  c.kv_heads = setup.kv_heads;
  c.query_heads = setup.kv_heads * setup.group;
  c.key_dim = setup.key_dim;
  c.value_dim = setup.value_dim;
  shape_.group = setup.group;
  shape_.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(setup.key_dim)));
  shape_.soft_cap = static_cast<float>(setup.soft_cap);
  shape_.storage = setup.storage;
  shape_.clusters = setup.clusters;
  shape_.sketch =
      largest_sketch_shape(setup.sketch.kind, setup.sketch.bits, static_cast<int>(setup.key_dim));
  for (std::size_t i = 0; i < setup.lengths.size() * index(setup.kv_heads); ++i)
    stores_.emplace_back(shape_);
  for (std::size_t slot = 0; slot < setup.lengths.size(); ++slot) {
    const Setup::Length& length = setup.lengths[slot];
    fill(static_cast<int>(slot), length.tokens);
    if (length.compressed == 0) continue;
    for (std::int64_t h = 0; h < setup.kv_heads; ++h) {
      std::vector<Positive16> odds(index(length.compressed));
      std::exponential_distribution<double> share(1 / setup.keep);
      for (std::size_t i = 0; i < odds.size(); ++i) {
        const double r = setup.equal_odds ? setup.keep : std::min(0.999, share(random_));
        odds[i] = i < 4 || r > 0.9 ? kPositive16Infinity : stored_odds(r);
      }
      cpu::HeadStore& store = this->store(static_cast<int>(slot), h);
      HeadCompression head;
      if (setup.sketch.kind != SketchKind::exact) {
        std::normal_distribution<double> normal;
        std::vector<float> queries(index(6 * setup.key_dim));
        for (float& x : queries) x = static_cast<float>(normal(random_));
        head.basis =
            make_basis(setup.sketch.bits, store.host().keys(shape_), odds, nullptr, queries, 5);
      }
      head.order = shuffled(length.compressed, setup.seed + 10 * slot + index(h));
      head.odds = odds_by_place(odds, 0, head.order);
      head.first_tokens = length.compressed;
      const DrawId name{3, slot, 0, static_cast<std::uint32_t>(h)};
      head.drawn = draw_places(name, Selection::poisson, head.odds, 0, head.order);
      if (setup.clusters) {
        head.clusters = make_clusters(store.host().values(shape_), head.order.position, head.odds);
      }
      std::optional<cpu::Window> window = store.reserve_compress(
          shape_, has_codes(setup.sketch.kind) ? head.basis.shape : shape_.sketch, head, 0);
      std::vector<float> scratch(2 * index(setup.key_dim) + 32);
      store.compress(shape_, cpu::scalar_kernels(), head, std::move(window), scratch);
    }
    append_last_again(static_cast<int>(slot));
  }
}

Scene::~Scene() { release(); }

void Scene::fill(int slot, std::int64_t count) {
  const std::int64_t heads = setup_.kv_heads;
  std::normal_distribution<double> normal;
  std::vector<float> key(index(count * heads * setup_.key_dim));
  std::vector<float> value(index(count * heads * setup_.value_dim));
  for (float& x : key) x = static_cast<float>(setup_.key_size * normal(random_));
  for (float& x : value) x = static_cast<float>(normal(random_));
  if (setup_.equal_keys) {
    const std::size_t row = index(heads * setup_.key_dim);
    for (std::size_t i = 4 * row; i < key.size(); ++i)
      key[i] = key[i / row * 7 % 4 * row + i % row];
  }
  const TensorView keys = token_major(key.data(), DType::f32, count, heads, setup_.key_dim);
  const TensorView values = token_major(value.data(), DType::f32, count, heads, setup_.value_dim);
  for (std::int64_t h = 0; h < heads; ++h) {
    store(slot, h).reserve_append(count, setup_.score_window);
    store(slot, h).append(shape_, cpu::scalar_kernels(), keys, values, h, setup_.score_window);
  }
}

// So that its query scores, which a compression ends.
void Scene::append_last_again(int slot) {
  for (std::int64_t h = 0; h < setup_.kv_heads; ++h) {
    cpu::HeadStore& store = this->store(slot, h);
    const std::int64_t last = store.tokens() - 1;
    if (last < store.compressed()) continue;
    const std::size_t element = size_bytes(setup_.storage);
    const std::size_t row_bytes = index(shape_.row_bytes());
    const verkv::test::FlatHead flat = verkv::test::flat(store, shape_);
    const std::byte* const row = flat.host_rows.data() + index(last) * row_bytes;
    const std::size_t key_bytes = index(setup_.key_dim) * element;
    store.truncate(last);
    store.reserve_append(1, setup_.score_window);
    store.append(shape_, cpu::scalar_kernels(),
                 token_major(row, setup_.storage, 1, 1, setup_.key_dim),
                 token_major(row + key_bytes, setup_.storage, 1, 1, setup_.value_dim), 0,
                 setup_.score_window);
  }
}

LayerView Scene::layer_view() const {
  LayerView view;
  view.kv_heads = static_cast<int>(setup_.kv_heads);
  view.group = setup_.group;
  view.key_dim = static_cast<int>(setup_.key_dim);
  view.value_dim = static_cast<int>(setup_.value_dim);
  view.scale = shape_.scale;
  view.soft_cap = static_cast<float>(setup_.soft_cap);
  view.storage = setup_.storage;
  view.sketch = shape_.sketch;
  view.clusters = setup_.clusters;
  view.fetch = flags_of(setup_.fetch.mode);
  view.rules = setup_.fetch;
  view.cap = setup_.fetch.cap;
  view.limit_tokens = setup_.fetch.limit_tokens;
  return view;
}

StepView Scene::step_view() const { return step_; }

void Scene::draw_queries(const std::function<void(std::vector<float>&)>& edit) {
  std::normal_distribution<double> normal;
  query_.resize(setup_.slots.size() * index(shape_.config.query_heads * setup_.key_dim));
  for (float& x : query_) x = static_cast<float>(setup_.query_size * normal(random_));
  if (edit) edit(query_);
  const std::size_t element = size_bytes(setup_.query_type);
  query_stored_.assign(index(query_at(static_cast<std::int64_t>(setup_.slots.size()), 0)) * element,
                       std::byte{});
  for (std::size_t i = 0; i < query_.size(); ++i) {
    const Half half = to_half(query_[i]);
    const BFloat16 brain = to_bfloat16(query_[i]);
    const void* from = setup_.query_type == DType::f32   ? static_cast<const void*>(&query_[i])
                       : setup_.query_type == DType::f16 ? static_cast<const void*>(&half)
                                                         : static_cast<const void*>(&brain);
    const std::int64_t head = static_cast<std::int64_t>(i) / setup_.key_dim;
    const std::int64_t at =
        query_at(head / shape_.config.query_heads, head % shape_.config.query_heads) +
        static_cast<std::int64_t>(i) % setup_.key_dim;
    std::memcpy(query_stored_.data() + index(at) * element, from, element);
  }
  if (step_.queries != nullptr) {
    check(cudaMemcpy(const_cast<void*>(step_.queries), query_stored_.data(), query_stored_.size(),
                     cudaMemcpyHostToDevice));
  }
}

template <class T>
T* Scene::to_device(const T* data, std::int64_t count, std::int64_t room) {
  if (std::max(count, room) == 0) return nullptr;
  void* memory = nullptr;
  check(cudaMalloc(&memory, index(std::max(count, room)) * sizeof(T)));
  device_.push_back(memory);
  if (count > 0 && data != nullptr)
    check(cudaMemcpy(memory, data, index(count) * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(memory);
}

void Scene::release() {
  for (void* memory : device_) (void)cudaFree(memory);
  for (void* memory : pinned_) (void)cudaFreeHost(memory);
  device_.clear();
  pinned_.clear();
}

HeadView Scene::upload_head(const cpu::HeadStore& store) {
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(setup_.storage));
  HeadView view;
  const std::int64_t room = store.residents() + more_residents_;
  const verkv::test::FlatHead flat = verkv::test::flat(store, shape_);
  const std::int64_t padded = cpu::round_up(store.compressed(), kSketchGroup);
  view.tokens = store.tokens();
  view.compressed = store.compressed();
  view.drawn = store.drawn_residents();
  const std::int64_t host_bytes = store.tokens() * shape_.row_bytes();
  if (host_bytes + more_residents_ > 0) {
    void* host = nullptr;
    check(cudaHostAlloc(&host, index(host_bytes + more_residents_ * shape_.row_bytes()),
                        cudaHostAllocMapped));
    pinned_.push_back(host);
    if (host_bytes > 0) std::memcpy(host, flat.host_rows.data(), index(host_bytes));
    void* mapped = nullptr;
    check(cudaHostGetDevicePointer(&mapped, host, 0));
    view.host_rows = static_cast<const std::byte*>(mapped);
  }
  view.place_position = to_device(store.order().position.data(), store.compressed());
  const std::int64_t key_bytes = setup_.key_dim * element;
  const std::int64_t value_bytes = setup_.value_dim * element;
  view.resident_keys =
      to_device(flat.resident_keys.data(), store.residents() * key_bytes, room * key_bytes);
  view.resident_values =
      to_device(flat.resident_values.data(), store.residents() * value_bytes, room * value_bytes);
  view.resident_place = to_device(flat.resident_places.data(), store.residents(), room);
  view.odds = to_device(flat.odds.data(), padded);
  if (setup_.clusters) {
    view.centroids =
        to_device(flat.centroids.data(), clusters_of(store.compressed()) * value_bytes);
    view.spreads = to_device(flat.spreads.data(), clusters_of(store.compressed()));
  }
  if (setup_.sketch.kind != SketchKind::exact && store.compressed() > 0) {
    view.codes =
        to_device(flat.codes.data(), code_storage_bytes(store.sketch(shape_), store.compressed()));
    view.scales = to_device(flat.scales.data(), padded);
    view.channel_means =
        to_device(flat.channel_means.data(), static_cast<std::int64_t>(flat.channel_means.size()));
    const SketchBasis& basis = store.basis().sketch;
    view.sketch_dim = basis.shape.dim;
    view.sketch_fine = basis.shape.fine;
    view.basis_unit = basis.unit;
    view.basis_query = to_device(store.basis().query.data(),
                                 static_cast<std::int64_t>(store.basis().query.size()));
  }
  const std::int64_t window = room - store.drawn_residents();
  const std::vector<float> squares(index(window), 0.0f);
  const std::vector<std::uint32_t> steps(index(window), 0u);
  view.window_square = to_device(squares.data(), window);
  view.window_steps = to_device(steps.data(), window);
  if (setup_.score_window) {
    const std::vector<float> given(index(kMostScoredTokens * window), 0.0f);
    const std::vector<std::uint32_t> has_given(index(kMostScoredTokens), 0u);
    view.given = to_device(given.data(), kMostScoredTokens * window);
    view.has_given = to_device(has_given.data(), kMostScoredTokens);
    view.given_stride = window;
    // A scene's window has the queries of its last append, or of its last token.
    view.first_scored = view.tokens - (store.compressed() > 0 ? 1 : view.tokens);
    view.first_scored = std::max(view.first_scored, view.tokens - kMostScoredTokens);
  }
  return view;
}

void Scene::upload() {
  const LayerView layer = layer_view();
  heads_.clear();
  std::int64_t most_compressed = 0;
  std::int64_t most_residents = 0;
  for (const cpu::HeadStore& store : stores_) {
    heads_.push_back(upload_head(store));
    most_compressed = std::max(most_compressed, store.compressed());
    most_residents = std::max(most_residents, store.residents() + more_residents_);
  }
  step_ = {};
  step_.layer = layer;
  step_.layer.sink_logits = to_device(setup_.sink_logits.data(), std::ssize(setup_.sink_logits));
  device_heads_ = to_device(heads_.data(), static_cast<std::int64_t>(heads_.size()));
  step_.heads = device_heads_;
  step_.rows = static_cast<int>(setup_.slots.size());
  std::vector<StepRow> batch;
  for (std::size_t row = 0; row < setup_.slots.size(); ++row)
    batch.push_back({setup_.slots[row], setup_.back.empty() ? 0 : setup_.back[row]});
  step_.batch = to_device(batch.data(), step_.rows);
  step_.queries = to_device(query_stored_.data(), static_cast<std::int64_t>(query_stored_.size()));
  step_.query_type = setup_.query_type;
  step_.query_row_stride = query_at(1, 0);
  step_.query_head_stride = query_at(0, 1);
  const std::int64_t query_heads = step_.rows * shape_.config.query_heads;
  outputs_ = query_heads * setup_.value_dim;
  step_.output = to_device<float>(nullptr, 0, outputs_);
  step_.lse = to_device<float>(nullptr, 0, query_heads);
  step_.query_reports = to_device<QueryHeadReport>(nullptr, 0, query_heads);
  step_.kv_reports = to_device<KvHeadReport>(nullptr, 0, step_.rows * setup_.kv_heads);
  step_.most_compressed = most_compressed;
  step_.most_residents = most_residents;
  step_.workspace = to_device<std::byte>(
      nullptr, 0, step_workspace_bytes(layer, step_.rows, most_compressed, most_residents));
}

void Scene::append(int slot, std::int64_t count) {
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(setup_.storage));
  fill(slot, count);
  for (std::int64_t h = 0; h < setup_.kv_heads; ++h) {
    const cpu::HeadStore& store = this->store(slot, h);
    const verkv::test::FlatHead flat = verkv::test::flat(store, shape_);
    HeadView& view = heads_[index(slot * setup_.kv_heads + h)];
    const std::int64_t before = view.residents();
    const auto copy = [&](auto* to, const void* from, std::int64_t unit) {
      check(cudaMemcpy(reinterpret_cast<std::byte*>(to) + before * unit,
                       static_cast<const std::byte*>(from) + before * unit, index(count * unit),
                       cudaMemcpyHostToDevice));
    };
    copy(view.resident_keys, flat.resident_keys.data(), setup_.key_dim * element);
    copy(view.resident_values, flat.resident_values.data(), setup_.value_dim * element);
    copy(view.resident_place, flat.resident_places.data(), 4);
    std::memcpy(const_cast<std::byte*>(view.host_rows) + view.tokens * shape_.row_bytes(),
                flat.host_rows.data() + view.tokens * shape_.row_bytes(),
                index(count * shape_.row_bytes()));
    view.first_scored = first_scored(view.tokens, store.tokens(), setup_.score_window);
    view.tokens = store.tokens();
  }
  check(cudaMemcpy(device_heads_, heads_.data(), heads_.size() * sizeof(HeadView),
                   cudaMemcpyHostToDevice));
}

void Scene::launch(cudaStream_t stream) { check(launch_step(step_, stream)); }

// ---- The step beside the CPU's ------------------------------------------------------------------

namespace {

template <class T>
std::vector<T> to_host(const T* from, std::int64_t count) {
  std::vector<T> values(index(count));
  if (count > 0)
    check(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

}  // namespace

// What a step has left on the device, and the CPU's step head by head. Differences become text.
class Scene::Comparison {
 public:
  explicit Comparison(Scene& scene)
      : scene_(scene),
        setup_(scene.setup_),
        output_(to_host(scene.step_.output, scene.outputs_)),
        lse_(to_host(scene.step_.lse, query_heads())),
        query_reports_(to_host(scene.step_.query_reports, query_heads())),
        kv_reports_(to_host(scene.step_.kv_reports, scene.step_.rows * setup_.kv_heads)),
        expected_(index(setup_.group * setup_.value_dim)),
        expected_lse_(index(setup_.group)),
        expected_reports_(index(setup_.group)) {
    const StepView& step = scene.step_;
    lay_out(step.layer, step_grid(step.layer, step.rows, step.most_compressed, step.most_residents),
            step.rows, step.most_compressed, step.most_residents, step.workspace, device_);
    cpu::WorkspaceSizes sizes;
    for (const cpu::HeadStore& store : scene.stores_) {
      sizes.cover(scene.shape_, setup_.fetch,
                  {store.compressed(), store.drawn_residents(),
                   store.residents() - store.drawn_residents()});
    }
    cpu_.resize(sizes);
  }

  std::string run() {
    for (row_ = 0; row_ < scene_.step_.rows; ++row_) {
      for (kv_ = 0; kv_ < setup_.kv_heads; ++kv_) compare_group();
    }
    return wrong_.str();
  }

 private:
  std::int64_t query_heads() const { return scene_.step_.rows * scene_.shape_.config.query_heads; }
  std::int64_t back() const { return setup_.back.empty() ? 0 : setup_.back[index(row_)]; }
  std::int64_t pair() const { return row_ * setup_.kv_heads + kv_; }
  std::int64_t first_head() const { return pair() * setup_.group; }

  template <class T>
  void say(const char* what, T got, T want) {
    if (wrong_.tellp() > 2000) return;
    wrong_.precision(9);
    wrong_ << "row " << row_ << " KV head " << kv_ << ": " << what << " is " << got << ", not "
           << want << "\n";
  }
  // Numbers by their bits.
  template <class T>
  void require_same(const char* what, T got, T want) {
    if constexpr (std::is_floating_point_v<T>) {
      if (!same_bits(got, want)) say(what, got, want);
    } else if (got != want) {
      say(what, got, want);
    }
  }

  void compare_group() {
    const int slot = setup_.slots[index(row_)];
    kv_report_ = {};
    std::fill(expected_.begin(), expected_.end(), 0.0f);
    std::fill(expected_lse_.begin(), expected_lse_.end(), -std::numeric_limits<float>::infinity());
    std::fill(expected_reports_.begin(), expected_reports_.end(), QueryHeadReport{});
    if (slot >= 0) {
      cpu::HeadStore& store = scene_.store(slot, kv_);
      step_on_cpu(store);
      compare_states(store);
      compare_fetched(store);
      compare_window(store, scene_.heads_[index(slot * setup_.kv_heads + kv_)]);
    }
    compare_reports();
    for (int h = 0; h < setup_.group; ++h) compare_answer(h);
  }

  void step_on_cpu(cpu::HeadStore& store) {
    cpu::StepArguments step;
    step.query = scene_.query_stored_.data() +
                 index(scene_.query_at(row_, kv_ * setup_.group)) * size_bytes(setup_.query_type);
    step.query_type = setup_.query_type;
    step.query_stride = scene_.query_at(0, 1);
    step.back = back();
    if (!setup_.sink_logits.empty())
      step.sink_logits = &setup_.sink_logits[index(kv_ * setup_.group)];
    step.output = expected_.data();
    step.lse = expected_lse_.data();
    step.query_reports = expected_reports_.data();
    step.kv_report = &kv_report_;
    cpu::run_step(cpu::scalar_kernels(), scene_.shape_, setup_.fetch, store, cpu_,
                  std::span(&step, 1));
  }

  void compare_states(const cpu::HeadStore& store) {
    const auto states = to_host(device_.heads + first_head(), setup_.group);
    for (int h = 0; h < setup_.group; ++h) {
      const cpu::HeadState& want = cpu_.states[index(h)];
      const HeadState& got = states[index(h)];
      require_same("shift", got.shift, want.shift);
      require_same("D", got.denominator, want.denominator);
      if (store.compressed() > 0) require_same("beta", got.beta, want.beta);
      require_same("by_clusters", got.by_clusters != 0, want.by_clusters);
      scene_.totals_.by_clusters += want.by_clusters;
      if (got.known != 0 && got.bound > setup_.fetch.epsilon) ++scene_.totals_.searched;
    }
  }

  void compare_fetched(const cpu::HeadStore& store) {
    const auto moved =
        to_host(device_.moved + pair() * device_.token_stride, kv_report_.moved_tokens);
    if (kv_reports_[index(pair())].moved_tokens == kv_report_.moved_tokens &&
        !std::equal(moved.begin(), moved.end(), cpu_.moved.begin()))
      say("list of moved tokens", "something", "the CPU's");
    if (store.compressed() == 0) return;
    const std::int64_t words = cpu::round_up(store.compressed(), kBlockTokens) / 32;
    const auto mask = to_host(device_.fetched + pair() * device_.mask_stride, words);
    std::vector<std::uint32_t> fetched;
    for (std::int64_t i = 0; i < store.compressed(); ++i) {
      const std::uint32_t word = mask[index(i / kBlockTokens * kLanes + i % kLanes)];
      if ((word >> (i % kBlockTokens / kLanes) & 1u) != 0)
        fetched.push_back(static_cast<std::uint32_t>(i));
    }
    const auto count = static_cast<std::int64_t>(fetched.size());
    if (count != kv_report_.fetched_tokens ||
        !std::equal(fetched.begin(), fetched.end(), cpu_.fetched.begin()))
      say("set of fetched tokens", count, kv_report_.fetched_tokens);
  }

  void compare_window(cpu::HeadStore& store, const HeadView& view) {
    const std::int64_t window = store.tokens() - back() - store.compressed();
    const float* want = store.window_scores().given_by(window);
    const std::int64_t given_row = view.tokens - back() - 1 - view.first_scored;
    const bool scores = view.given != nullptr && window > 0 && given_row >= 0;
    require_same("whether a query scores", scores, want != nullptr);
    if (!scores || want == nullptr) return;
    bool computable = true;
    for (int h = 0; h < setup_.group; ++h)
      computable = computable && cpu_.states[index(h)].computable;
    require_same("whether a query gives", to_host(view.has_given + given_row, 1)[0] != 0,
                 computable);
    if (!computable) return;
    const auto got = to_host(view.given + given_row * view.given_stride, window);
    for (std::int64_t i = 0; i < window; ++i) {
      if (same_bits(got[index(i)], want[i])) continue;
      say("given to the window", got[index(i)], want[i]);
      break;
    }
  }

  void compare_reports() {
    const KvHeadReport& got = kv_reports_[index(pair())];
    require_same("fetched_tokens", got.fetched_tokens, kv_report_.fetched_tokens);
    require_same("moved_tokens", got.moved_tokens, kv_report_.moved_tokens);
    require_same("moved_bytes", got.moved_bytes, kv_report_.moved_bytes);
    require_same("resident_tokens", got.resident_tokens, kv_report_.resident_tokens);
    require_same("limited", got.limited, kv_report_.limited);
    scene_.totals_.fetched += kv_report_.fetched_tokens;
    scene_.totals_.moved += kv_report_.moved_tokens;
  }

  void compare_answer(int h) {
    const std::int64_t head = first_head() + h;
    const QueryHeadReport& got = query_reports_[index(head)];
    const QueryHeadReport& want = expected_reports_[index(h)];
    require_same("epsilon", got.epsilon, want.epsilon);
    require_same("sketch error", got.sketch_error, want.sketch_error);
    require_same("certified", got.certified, want.certified);
    require_same("planned_tokens", got.planned_tokens, want.planned_tokens);
    const double off = std::fabs(got.output_error - want.output_error);
    if (!(off <= tolerance::kBackendOutputError * want.output_error))
      require_same("output error", got.output_error, want.output_error);
    scene_.totals_.uncertified += !want.certified && !enlarges(want.sketch_error);
    // Values are of size 1, and their weighted sums are in another order.
    for (std::int64_t d = 0; d < setup_.value_dim; ++d) {
      const float a = output_[index(head * setup_.value_dim + d)];
      const float b = expected_[index(h * setup_.value_dim + d)];
      const double error = std::fabs(static_cast<double>(a) - static_cast<double>(b));
      if (error == error) scene_.worst_output_ = std::max(scene_.worst_output_, error);
      if (!(error < tolerance::kRowOrder) && !(a != a && b != b)) {
        say("output", a, b);
        break;
      }
    }
    const float a = lse_[index(head)];
    const float b = expected_lse_[index(h)];
    const double error = std::fabs(static_cast<double>(a) - static_cast<double>(b));
    const double size = std::max(1.0, std::fabs(static_cast<double>(b)));
    if (!(error < tolerance::kRowOrder * size) && !same_bits(a, b)) say("LSE", a, b);
  }

  Scene& scene_;
  const Setup& setup_;
  // The device's.
  std::vector<float> output_;
  std::vector<float> lse_;
  std::vector<QueryHeadReport> query_reports_;
  std::vector<KvHeadReport> kv_reports_;
  StepWorkspace device_;
  // The CPU's, of one KV head.
  cpu::Workspace cpu_;
  std::vector<float> expected_;
  std::vector<float> expected_lse_;
  std::vector<QueryHeadReport> expected_reports_;
  KvHeadReport kv_report_;
  std::int64_t row_ = 0;
  std::int64_t kv_ = 0;
  std::ostringstream wrong_;
};

std::string Scene::compare() {
  check(cudaDeviceSynchronize());
  totals_ = {};
  return Comparison(*this).run();
}

}  // namespace verkv::cuda::test
