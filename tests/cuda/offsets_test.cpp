// Offsets beyond 2^31 and 2^32 elements. A view whose arrays begin far before memory that is really
// there, or whose strides are huge, must give what a small one gives: an offset that is cut to 32
// bits lands where nothing is, which the device reports, or where something else is.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <verkv/clusters.hpp>
#include <verkv/inclusion.hpp>

#include "append.hpp"
#include "catch.hpp"
#include "compress.hpp"
#include "cuda_error.hpp"
#include "cudart.hpp"
#include "step_kernels.hpp"
#include "step_support.hpp"

using namespace verkv;
using namespace verkv::cuda;
using namespace verkv::cuda::test;

namespace {

using cpu_device::Kernel;
using KernelPointer = std::shared_ptr<const Kernel>;

// A multiple of 512, so that blocks of tokens and words of masks stay what they are.
constexpr std::int64_t kFarTokens = 3000000000;
constexpr std::int64_t kFarSlots = 2900000000;
constexpr std::int64_t kFarStride = std::int64_t{1} << 32;

cpu_device::Device& large_device() {
  cpu_device::DeviceOptions options;
  options.memory_bytes = std::uint64_t{1} << 50;
  return cpu_device::reset_device(options);
}

std::string first_fault() {
  cpu_device::current_device().synchronize();
  const auto& faults = cpu_device::current_device().faults();
  return faults.empty() ? "" : faults.front().what();
}

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Memory of which only what is touched exists.
template <class T>
T* allocate(std::int64_t count) {
  void* memory = nullptr;
  VERKV_CUDA_CHECK(cudaMalloc(&memory, size(count) * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
T* upload(const std::vector<T>& values) {
  T* memory = allocate<T>(static_cast<std::int64_t>(values.size()));
  VERKV_CUDA_CHECK(
      cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

template <class T>
std::vector<T> download(const T* from, std::int64_t count) {
  std::vector<T> values(size(count));
  if (count > 0) {
    VERKV_CUDA_CHECK(
        cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
  return values;
}

// The address of an array whose element `count` is the one given.
template <class T>
T* before(T* element, std::int64_t count) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(element) - size(count) * sizeof(T));
}

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// ---- What kernels around a step write -----------------------------------------------------------

constexpr std::int64_t kNew = 3;          // tokens appended
constexpr std::int64_t kRoom = 40;        // tokens there is room for
constexpr std::int64_t kDim = 24;         // of keys and of values
constexpr std::int64_t kCompressed = 16;  // before, all of them drawn

float* identity() {
  std::vector<float> matrix(size(kDim * kDim));
  for (std::int64_t i = 0; i < kDim; ++i) matrix[size(i * (kDim + 1))] = 1;
  return upload(matrix);
}

// One head's memory, and its view as if `tokens` tokens and `slots` residents lay before it.
struct Arrays {
  std::byte* rows = nullptr;  // pinned
  std::byte* keys = allocate<std::byte>(kRoom * kDim * 4);
  std::byte* values = allocate<std::byte>(kRoom * kDim * 4);
  std::uint32_t* place = allocate<std::uint32_t>(kRoom);
  std::uint8_t* codes = nullptr;
  Positive16* scales = upload(std::vector<Positive16>(size(kRoom)));
  Positive16* odds = upload(std::vector<Positive16>(size(kRoom), stored_odds(0.5)));
  float* basis = identity();
  float* means = upload(std::vector<float>(size(kDim), 0.25f));
  float* square = allocate<float>(kRoom);
  std::uint32_t* steps = allocate<std::uint32_t>(kRoom);

  explicit Arrays(const LayerView& layer) {
    void* host = nullptr;
    VERKV_CUDA_CHECK(cudaHostAlloc(&host, size(kRoom * layer.row_bytes()), cudaHostAllocMapped));
    rows = static_cast<std::byte*>(host);
    std::memset(host, 0, size(kRoom * layer.row_bytes()));
    codes = upload(std::vector<std::uint8_t>(size(code_storage_bytes(layer.sketch, kRoom))));
  }

  HeadView view(const LayerView& layer, std::int64_t tokens, std::int64_t slots) const {
    const std::int64_t key = kDim * 4;
    HeadView head;
    head.compressed = tokens + kCompressed;
    head.tokens = head.compressed;
    head.drawn = slots + kCompressed;
    head.host_rows = before(rows, tokens * layer.row_bytes());
    head.resident_keys = before(keys, slots * key);
    head.resident_values = before(values, slots * key);
    head.resident_place = before(place, slots);
    // Of the new tokens, the last one first.
    std::vector<std::uint32_t> position;
    for (std::int64_t i = kNew; i > 0; --i)
      position.push_back(static_cast<std::uint32_t>(head.compressed + i - 1));
    head.place_position = before(upload(position), head.compressed);
    head.codes = before(codes, tokens * layer.sketch.code_bytes());
    head.scales = before(scales, tokens);
    head.odds = before(odds, tokens);
    head.channel_means = means;
    head.sketch_dim = layer.sketch.dim;
    head.sketch_fine = layer.sketch.fine;
    head.basis_encode = basis;
    head.window_square = square;
    head.window_steps = steps;
    return head;
  }
};

LayerView small_layer() {
  LayerView layer;
  layer.key_dim = layer.value_dim = static_cast<int>(kDim);
  layer.storage = DType::f32;
  layer.sketch = {SketchKind::calibrated, layer.key_dim, 16};
  return layer;
}

// New rows whose strides are beyond 2^32 elements, in memory that is mostly not there.
struct FarRows {
  TensorView view;
  explicit FarRows(float first) {
    float* memory = allocate<float>((kNew - 1) * kFarStride + kDim);
    for (std::int64_t i = 0; i < kNew; ++i) {
      std::vector<float> row(size(kDim));
      for (float& x : row) x = first += 0.37f;
      VERKV_CUDA_CHECK(
          cudaMemcpy(memory + i * kFarStride, row.data(), row.size() * 4, cudaMemcpyHostToDevice));
    }
    view = {memory, DType::f32, kNew, 1, kDim, kFarStride, 0};
  }
};

}  // namespace

TEST_CASE("append, encode and gather at positions beyond 2^31") {
  large_device();
  const LayerView layer = small_layer();
  const FarRows keys(-2);
  const FarRows values(5);
  BadNumber* bad = upload(std::vector<BadNumber>(1));

  // The same calls on both; what they wrote.
  struct Written {
    std::vector<std::byte> rows, keys, values;
    std::vector<std::uint8_t> codes;
    std::vector<Positive16> scales;
  };
  const auto write = [&](std::int64_t tokens, std::int64_t slots) {
    const Arrays arrays(layer);
    HeadView* const head = upload(std::vector<HeadView>{arrays.view(layer, tokens, slots)});
    AppendArguments step;
    step.heads = head;
    step.keys = keys.view;
    step.values = values.view;
    step.first = tokens + kCompressed;
    step.counts = true;
    step.bad = bad;
    VERKV_CUDA_CHECK(launch_append(layer, step, nullptr));
    VERKV_CUDA_CHECK(launch_encode(layer, head, tokens + kCompressed + kNew, nullptr));

    REQUIRE(first_fault() == "");
    const HeadView after = download(head, 1)[0];
    CHECK(after.tokens == tokens + kCompressed + kNew);
    CHECK(download(arrays.place + kCompressed, 1)[0] ==
          static_cast<std::uint32_t>(tokens + kCompressed));

    // A redraw that keeps the new tokens: rows come from the host tier.
    const Arrays gathered(layer);
    HeadView to = gathered.view(layer, tokens, 0);
    to.tokens = to.compressed = after.tokens;
    to.drawn = kNew;
    std::vector<std::uint32_t> kept;
    for (std::int64_t i = 0; i < kNew; ++i)
      kept.push_back(static_cast<std::uint32_t>(tokens + kCompressed + i));
    GatherArguments gather;
    gather.from = head;
    gather.to = upload(std::vector<HeadView>{to});
    gather.keeps_drawn = false;
    gather.place = upload(kept);
    gather.stride = kNew;
    gather.most_residents = kNew;
    VERKV_CUDA_CHECK(launch_gather_residents(layer, gather, nullptr));
    REQUIRE(first_fault() == "");
    const std::int64_t row = kDim * 4;
    for (std::int64_t i = 0; i < kNew; ++i) {
      const std::int64_t last_first = (kCompressed + kNew - 1 - i) * row;
      CHECK(same_bytes(download(gathered.keys + i * row, row),
                       download(arrays.keys + last_first, row)));
      CHECK(same_bytes(download(gathered.values + i * row, row),
                       download(arrays.values + last_first, row)));
    }
    CHECK(download(gathered.place, kNew) == kept);

    Written written;
    written.rows.assign(arrays.rows, arrays.rows + kRoom * layer.row_bytes());
    written.keys = download(arrays.keys + kCompressed * row, kNew * row);
    written.values = download(arrays.values + kCompressed * row, kNew * row);
    written.codes = download(arrays.codes, code_storage_bytes(layer.sketch, kRoom));
    written.scales = download(arrays.scales, kRoom);
    return written;
  };
  const Written near = write(0, 0);
  const Written far = write(kFarTokens, kFarSlots);
  CHECK(same_bytes(near.rows, far.rows));
  CHECK(same_bytes(near.keys, far.keys));
  CHECK(same_bytes(near.values, far.values));
  CHECK(same_bytes(near.codes, far.codes));
  CHECK(same_bytes(near.scales, far.scales));
  CHECK(std::any_of(near.codes.begin(), near.codes.end(), [](auto x) { return x != 0; }));
}

// ---- A step -------------------------------------------------------------------------------------

namespace {

// The arguments of a step of the scene, with a workspace of their own.
StepArguments arguments_of(const Scene& scene, int score_splits, int attention_splits) {
  StepArguments arguments;
  StepView& step = arguments.view;
  step = scene.step_view();
  arguments.grid = step_grid(step.layer, step.rows, step.most_compressed, step.most_residents);
  if (score_splits > 0) arguments.grid.score_splits = score_splits;
  if (attention_splits > 0) arguments.grid.attention_splits = attention_splits;
  const std::int64_t bytes = lay_out(step.layer, arguments.grid, step.rows, step.most_compressed,
                                     step.most_residents, nullptr, arguments.workspace);
  lay_out(step.layer, arguments.grid, step.rows, step.most_compressed, step.most_residents,
          allocate<std::byte>(bytes), arguments.workspace);
  const std::int64_t query_heads = std::int64_t{step.rows} * step.layer.query_heads();
  step.output = allocate<float>(query_heads * step.layer.value_dim);
  step.lse = allocate<float>(query_heads);
  step.query_reports = allocate<QueryHeadReport>(query_heads);
  step.kv_reports = allocate<KvHeadReport>(std::int64_t{step.rows} * step.layer.kv_heads);
  return arguments;
}

void launch_all(const StepArguments& arguments) {
  VERKV_CUDA_CHECK(launch_scores(arguments, nullptr));
  VERKV_CUDA_CHECK(launch_plan(arguments, nullptr));
  VERKV_CUDA_CHECK(launch_certificate(arguments, nullptr));
  VERKV_CUDA_CHECK(launch_attention(arguments, nullptr));
}

// The kernel as the blocks of one split run it, whichever it is launched for.
KernelPointer of_split(const Kernel& kernel, unsigned split) {
  auto changed = std::make_shared<Kernel>(kernel);
  const auto edit = [&](cpu_device::Operand& operand) {
    if (operand.kind != cpu_device::Operand::Kind::special ||
        operand.value != static_cast<std::uint64_t>(cpu_device::Special::ctaid_y))
      return;
    operand.kind = cpu_device::Operand::Kind::immediate;
    operand.value = split;
  };
  for (cpu_device::Instruction& instruction : changed->code) {
    for (cpu_device::Operand& operand : instruction.operands) edit(operand);
  }
  return changed;
}

// Remembers the last kernel launched, and runs it again for one split with other arguments.
class LastKernel {
 public:
  LastKernel() {
    cpu_device::current_device().change_kernels([this](const KernelPointer& kernel) {
      kernel_ = kernel;
      return kernel;
    });
  }
  ~LastKernel() { cpu_device::current_device().change_kernels({}); }
  void run_split(const StepArguments& arguments, unsigned split) const {
    cpu_device::Device& device = cpu_device::current_device();
    REQUIRE(first_fault() == "");
    cpu_device::LaunchShape shape = device.launches().back().shape;
    REQUIRE(device.launches().back().kernel == kernel_->readable_name);
    shape.grid.y = 1;
    const auto kernel = of_split(*kernel_, split);
    REQUIRE(device.launch_with(kernel, shape, cpu_device::kLegacyStream, arguments) ==
            cpu_device::Status::success);
    REQUIRE(first_fault() == "");
  }

 private:
  KernelPointer kernel_;
};

Setup one_head() {
  Setup setup;
  setup.kv_heads = 1;
  setup.group = 2;
  setup.key_dim = 64;
  setup.value_dim = 64;
  setup.fetch.epsilon = kOff;
  setup.query_size = 3;
  setup.lengths = {{1070, 1024}};
  return setup;
}

// The scene's only head, as the end of one of `tokens` more compressed tokens and `slots` more
// residents, which are not there.
HeadView far_head(const Scene& scene, std::int64_t tokens, std::int64_t slots) {
  const LayerView layer = scene.layer_view();
  HeadView head = scene.head_view(0, 0);
  const std::int64_t element = static_cast<std::int64_t>(size_bytes(layer.storage));
  // Of an array of places or positions.
  const auto later = [&](const std::uint32_t* from, std::int64_t count) {
    std::vector<std::uint32_t> values = download(from, count);
    for (std::uint32_t& value : values) value += static_cast<std::uint32_t>(tokens);
    return upload(values);
  };
  head.host_rows = before(head.host_rows, tokens * layer.row_bytes());
  head.resident_keys = before(head.resident_keys, slots * layer.key_dim * element);
  head.resident_values = before(head.resident_values, slots * layer.value_dim * element);
  head.resident_place = before(later(head.resident_place, head.residents()), slots);
  head.place_position = before(later(head.place_position, head.compressed), tokens);
  head.codes = before(head.codes, tokens * sketch_of(layer, head).code_bytes());
  head.scales = before(head.scales, tokens);
  head.odds = before(head.odds, tokens);
  head.centroids = before(head.centroids, tokens / kClusterTokens * layer.value_dim * element);
  head.spreads = before(head.spreads, tokens / kClusterTokens);
  head.tokens += tokens;
  head.compressed += tokens;
  head.drawn += slots;
  return head;
}

}  // namespace

TEST_CASE("scores of tokens and residents beyond 2^31") {
  for (const SketchKind sketch : {SketchKind::exact, SketchKind::calibrated}) {
    CAPTURE(static_cast<int>(sketch));
    large_device();
    Setup setup = one_head();
    setup.sketch.kind = sketch;
    Scene scene(setup);
    scene.draw_queries();
    scene.upload();
    const LastKernel last;
    StepArguments near = arguments_of(scene, 1, 0);
    VERKV_CUDA_CHECK(launch_scores(near, nullptr));

    // The near tokens and residents are those of the last of so many splits, which are cut between
    // the 16 residents that a warp takes at a time.
    constexpr std::int64_t kSplits = 4000000;
    const HeadView& head = scene.head_view(0, 0);
    const std::int64_t tokens = (kSplits - 1) * head.compressed;
    const std::int64_t slots = (kSplits - 1) * ((head.residents() + 15) / 16 * 16);
    StepArguments far = arguments_of(scene, static_cast<int>(kSplits), 0);
    far.view.heads = upload(std::vector<HeadView>{far_head(scene, tokens, slots)});
    const StepWorkspace ws = far.workspace;
    far.workspace.weight = before(ws.weight, tokens);
    far.workspace.resident_logit = before(ws.resident_logit, slots);
    last.run_split(far, static_cast<unsigned>(kSplits - 1));

    REQUIRE(ws.token_stride == near.workspace.token_stride);
    for (int h = 0; h < setup.group; ++h) {
      CHECK(same_bytes(download(ws.weight + h * ws.token_stride, head.compressed),
                       download(near.workspace.weight + h * ws.token_stride, head.compressed)));
      CHECK(same_bytes(
          download(ws.resident_logit + h * ws.resident_stride, head.residents()),
          download(near.workspace.resident_logit + h * ws.resident_stride, head.residents())));
      CHECK(same_bytes(download(ws.slice_top + (h + 1) * kSplits - 1, 1),
                       download(near.workspace.slice_top + h, 1)));
    }
  }
}

TEST_CASE("attention over rows and partial results beyond 2^31") {
  struct Case {
    bool clusters;
    std::int64_t splits;
    std::int64_t tokens;
  };
  // partial_output of the second head lies beyond 2^31. With clusters every split has as many as
  // the near head; their centroids lie beyond 2^31 bytes.
  constexpr std::int64_t kClusterSplits = 2900000;
  for (const Case one : {Case{false, std::int64_t{1} << 25, kFarTokens},
                         Case{true, kClusterSplits, (kClusterSplits - 1) * 1024}}) {
    CAPTURE(one.clusters);
    large_device();
    Setup setup = one_head();
    setup.clusters = one.clusters;
    Scene scene(setup);
    scene.draw_queries();
    scene.upload();
    const LastKernel last;
    const StepArguments near = arguments_of(scene, 0, 1);
    launch_all(near);
    REQUIRE(first_fault() == "");
    const StepView& step = near.view;
    const int group = step.layer.group;
    const GroupState found = download(near.workspace.groups, 1)[0];
    REQUIRE(found.moved > 10);

    const HeadView& head = scene.head_view(0, 0);
    REQUIRE(head.compressed == 1024);
    for (const HeadState& state : download(near.workspace.heads, group))
      CHECK((state.by_clusters != 0) == one.clusters);
    const std::int64_t slots = (one.splits - 1) * head.residents();
    const std::int64_t listed = (one.splits - 1) * found.moved;
    StepArguments far = near;
    far.grid.attention_splits = static_cast<int>(one.splits);
    far.view.heads = upload(std::vector<HeadView>{far_head(scene, one.tokens, slots)});
    GroupState groups = found;
    groups.moved = one.splits * found.moved;
    std::vector<std::uint32_t> moved = download(near.workspace.moved, found.moved);
    for (std::uint32_t& position : moved) position += static_cast<std::uint32_t>(one.tokens);
    const std::int64_t padded = 4 * near.grid.units;
    StepWorkspace& ws = far.workspace;
    ws.groups = upload(std::vector<GroupState>{groups});
    ws.finished = upload(std::vector<std::uint32_t>(size(near.grid.attention_parts)));
    ws.weight = before(ws.weight, one.tokens);
    ws.resident_logit = before(ws.resident_logit, slots);
    ws.centroid_logit = before(ws.centroid_logit, one.tokens / kClusterTokens);
    ws.fetched = before(ws.fetched, one.tokens / 32);
    ws.moved = before(upload(moved), listed);
    ws.partial_top = allocate<float>(group * one.splits);
    ws.partial_sum = allocate<float>(group * one.splits);
    ws.partial_output = allocate<float>(group * one.splits * padded);
    last.run_split(far, static_cast<unsigned>(one.splits - 1));

    for (int h = 0; h < group; ++h) {
      const std::int64_t at = (h + 1) * one.splits - 1;
      CHECK(same_bytes(download(ws.partial_top + at, 1),
                       download(near.workspace.partial_top + h, 1)));
      CHECK(same_bytes(download(ws.partial_sum + at, 1),
                       download(near.workspace.partial_sum + h, 1)));
      CHECK(same_bytes(download(ws.partial_output + at * padded, padded),
                       download(near.workspace.partial_output + h * padded, padded)));
    }
  }
}

TEST_CASE("a step whose strides between heads and rows are beyond 2^31") {
  for (const bool limited : {false, true}) {
    large_device();
    Setup setup = one_head();
    setup.lengths = {{600, 560}, {300, 250}};
    setup.slots = {1, 0};
    setup.fetch.epsilon = 0.1;  // a search
    if (limited) setup.fetch.limit_tokens = 20;
    Scene scene(setup);
    scene.draw_queries();
    scene.upload();
    scene.launch(nullptr);
    REQUIRE(scene.compare() == "");
    REQUIRE(scene.totals().searched > 0);
    REQUIRE(scene.totals().moved > 10);
    const StepArguments near = arguments_of(scene, 0, 0);
    launch_all(near);

    StepArguments far = arguments_of(scene, 0, 0);
    StepWorkspace& ws = far.workspace;
    ws.token_stride = ws.resident_stride = ws.mask_stride = ws.cluster_stride = kFarStride;
    const std::int64_t query_heads = std::int64_t{near.view.rows} * setup.group;
    const auto strided = [](std::int64_t heads) { return (heads - 1) * kFarStride + 1024; };
    ws.weight = allocate<float>(strided(query_heads));
    ws.resident_logit = allocate<float>(strided(query_heads));
    ws.centroid_logit = allocate<float>(strided(query_heads));
    ws.cluster_factor = allocate<float>(strided(query_heads));
    ws.wanted = allocate<std::uint32_t>(strided(query_heads));
    ws.active = allocate<std::uint32_t>(strided(query_heads));
    ws.plan_index = allocate<std::uint32_t>(strided(query_heads));
    ws.fetched = allocate<std::uint32_t>(strided(near.view.rows));
    ws.moved = allocate<std::uint32_t>(strided(near.view.rows));
    far.view.query_head_stride = kFarStride;
    far.view.query_row_stride = setup.group * kFarStride;
    float* const queries = allocate<float>(strided(query_heads));
    const float* const given = static_cast<const float*>(near.view.queries);
    for (std::int64_t i = 0; i < query_heads; ++i) {
      VERKV_CUDA_CHECK(cudaMemcpy(queries + i * kFarStride, given + i * setup.key_dim,
                                  size(setup.key_dim) * 4, cudaMemcpyDeviceToDevice));
    }
    far.view.queries = queries;
    launch_all(far);
    REQUIRE(first_fault() == "");
    const std::int64_t outputs = query_heads * setup.value_dim;
    CHECK(same_bytes(download(far.view.output, outputs), download(near.view.output, outputs)));
    CHECK(same_bytes(download(far.view.lse, query_heads), download(near.view.lse, query_heads)));
    CHECK(same_bytes(download(far.view.query_reports, query_heads),
                     download(near.view.query_reports, query_heads)));
    CHECK(same_bytes(download(far.view.kv_reports, near.view.rows),
                     download(near.view.kv_reports, near.view.rows)));
  }
}

TEST_CASE("a workspace of more than 2^32 elements is laid out in 64 bits") {
  LayerView layer;
  layer.kv_heads = 2;
  layer.group = 3;
  layer.key_dim = layer.value_dim = 128;
  const StepGrid grid = step_grid(layer, 5, kFarTokens, kFarSlots);
  StepWorkspace ws;
  const std::int64_t bytes = lay_out(layer, grid, 5, kFarTokens, kFarSlots, nullptr, ws);
  CHECK(ws.token_stride == kFarTokens);
  CHECK(reinterpret_cast<std::uintptr_t>(ws.resident_logit) == size(30 * kFarTokens * 4));
  CHECK(bytes > 30 * (kFarTokens + kFarSlots) * 4);
  CHECK(step_workspace_bytes(layer, 5, kFarTokens, kFarSlots) >= bytes);
}
