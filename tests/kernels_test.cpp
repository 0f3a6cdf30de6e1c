// The inner loops of a CPU step: every vector implementation against the scalar one, bit for bit,
// and the scalar one against plain loops in double.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/clusters.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/shrinkage.hpp>
#include <verkv/sketch.hpp>
#include <verkv/types.hpp>

#include "catch.hpp"
#include "cpu/kernels.hpp"
#include "sum_order.hpp"
#include "tolerance.hpp"

namespace {

using verkv::BFloat16;
using verkv::DType;
using verkv::Half;
using verkv::Positive16;
using verkv::Rows;
using verkv::SettledTerms;
using verkv::cpu::HeadConstants;
using verkv::cpu::Kernels;
using verkv::cpu::PlanArrays;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// Half a unit in the last place of 1.
constexpr double kRound = 0.5 * static_cast<double>(std::numeric_limits<float>::epsilon());

const std::vector<std::int64_t> kCounts = {0,  1,  2,   15,  16,  17,   31,  63,
                                           64, 65, 511, 512, 513, 1025, 5000};
const std::vector<int> kDims = {1, 4, 7, 16, 64, 80, 96, 100, 112, 128, 256};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::int64_t whole_groups(std::int64_t n) { return (n + 15) / 16 * 16; }

// ---- Comparison --------------------------------------------------------------------------------

// Every NaN counts as the same: which of two payloads survives an operation is up to the compiler.
std::uint32_t bits(float x) {
  return std::isnan(x) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(x);
}
std::uint64_t bits(double x) {
  return std::isnan(x) ? 0x7ff8000000000000u : std::bit_cast<std::uint64_t>(x);
}
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return bits(a) == bits(b);
  } else {
    return a == b;
  }
}

template <class T>
void check_same(const char* what, const std::vector<T>& expected, const std::vector<T>& actual) {
  INFO(what);
  REQUIRE(expected.size() == actual.size());
  std::size_t at = 0;
  while (at < expected.size() && same(expected[at], actual[at])) ++at;
  if (at == expected.size()) {
    SUCCEED();
  } else {
    INFO("element " << at << " of " << expected.size() << ": " << actual[at] << ", expected "
                    << expected[at]);
    CHECK(false);
  }
}

// ---- Data --------------------------------------------------------------------------------------

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  double uniform() { return static_cast<double>(engine_()) / 4294967296.0; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(engine_() % n); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }

 private:
  std::mt19937 engine_;
};

// Odds of all kinds: never drawn, always resident, drawn; rarely extreme.
std::vector<Positive16> random_odds(Random& random, std::int64_t count) {
  std::vector<Positive16> odds(size(whole_groups(count)), Positive16{0xffff});
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t kind = random.below(16);
    Positive16& rho = odds[size(i)];
    if (kind == 0) {
      rho = Positive16{0};
    } else if (kind == 1) {
      rho = verkv::kPositive16Infinity;
    } else if (kind == 2) {
      rho = verkv::to_positive16(65536.0f);
    } else if (kind == 3) {
      rho = Positive16{static_cast<std::uint16_t>(random.below(0x100))};  // denormal
    } else {
      rho = verkv::stored_odds(random.uniform() * random.uniform());
    }
  }
  return odds;
}

// Weights as the step has them: 0 where the odds are infinite; elsewhere exp of something, 0,
// denormal or NaN.
std::vector<float> random_weights(Random& random, const std::vector<Positive16>& odds,
                                  std::int64_t count, int heads, std::int64_t stride,
                                  bool with_nan) {
  std::vector<float> w(size(heads * stride), -1.0f);
  for (int h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < count; ++i) {
      float& x = w[size(h * stride + i)];
      const std::uint32_t kind = random.below(32);
      if (odds[size(i)].bits >= verkv::kPositive16Infinity.bits || kind == 0) {
        x = 0;
      } else if (kind == 1) {
        x = 1e-40f;
      } else if (kind == 2 && with_nan) {
        x = kNaN;
      } else if (kind == 3) {
        x = static_cast<float>(std::exp(random.uniform(-87, 60)));
      } else if (kind == 4) {
        x = verkv::to_float(odds[size(i)]) * 0.5f;  // on the edge for beta = 0.5
      } else {
        x = static_cast<float>(std::exp(random.uniform(-12, 1)));
      }
    }
  }
  return w;
}

std::vector<float> random_betas(Random& random, int heads) {
  std::vector<float> beta(size(heads));
  for (float& x : beta) {
    switch (random.below(8)) {
      case 0:
        x = 0;
        break;
      case 1:
        x = kInfinity;
        break;
      case 2:
        x = 0.5f;
        break;
      default:
        x = static_cast<float>(std::exp(random.uniform(-8, 2)));
    }
  }
  return beta;
}

// Elements of one type, as values and as stored.
struct RowData {
  std::vector<float> f32;
  std::vector<Half> f16;
  std::vector<BFloat16> bf16;
  Rows rows;

  float at(std::int64_t row, int j) const {
    const std::size_t k = size(row * rows.stride + j);
    switch (rows.type) {
      case DType::f32:
        return f32[k];
      case DType::f16:
        return verkv::to_float(f16[k]);
      case DType::bf16:
        return verkv::to_float(bf16[k]);
    }
    return 0;
  }
};

// The storage ends with the last row, so that a read past a row's end is one past the storage.
RowData random_rows(Random& random, DType type, std::int64_t count, int dim, std::int64_t stride) {
  RowData data;
  const std::int64_t elements = count == 0 ? 0 : (count - 1) * stride + dim;
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint32_t kind = random.below(64);
    float x = static_cast<float>(random.uniform(-3, 3));
    if (kind == 0) x = 0;
    if (kind == 1) x = -0.0f;
    if (kind == 2) x = 3e-6f;  // subnormal in binary16
    if (kind == 3) x = 6.0e4f;
    switch (type) {
      case DType::f32:
        data.f32.push_back(x);
        break;
      case DType::f16:
        data.f16.push_back(verkv::to_half(x));
        break;
      case DType::bf16:
        data.bf16.push_back(verkv::to_bfloat16(x));
        break;
    }
  }
  data.rows.type = type;
  data.rows.stride = stride;
  data.rows.dim = dim;
  switch (type) {
    case DType::f32:
      data.rows.data = data.f32.data();
      break;
    case DType::f16:
      data.rows.data = data.f16.data();
      break;
    case DType::bf16:
      data.rows.data = data.bf16.data();
      break;
  }
  return data;
}

// The same rows in pages whose order in memory says nothing of theirs: row i is row i + first of
// the pages, `offset` elements into its space there. Every page ends where its last row ends.
class PagedCopy {
 public:
  PagedCopy(const RowData& data, std::int64_t count, std::int64_t first, std::int64_t offset) {
    const std::int64_t element = static_cast<std::int64_t>(verkv::size_bytes(data.rows.type));
    const std::int64_t stride = data.rows.stride + offset;
    for (std::int64_t begin = 0; begin < first + count; begin += verkv::kPageRows) {
      const std::int64_t here = std::min(verkv::kPageRows, first + count - begin);
      pages_.emplace_back(size(((here - 1) * stride + offset + data.rows.dim) * element));
      for (std::int64_t r = 0; r < here; ++r) {
        const std::int64_t row = begin + r - first;
        if (row < 0) continue;
        std::memcpy(
            pages_.back().data() + (r * stride + offset) * element,
            static_cast<const std::byte*>(data.rows.data) + row * data.rows.stride * element,
            size(data.rows.dim * element));
      }
    }
    for (const std::vector<std::byte>& page : pages_) addresses_.push_back(page.data());
    rows = {nullptr, data.rows.type, stride, data.rows.dim, addresses_.data(), first, offset};
  }
  PagedCopy(const PagedCopy&) = delete;
  PagedCopy& operator=(const PagedCopy&) = delete;

  Rows rows;

 private:
  std::vector<std::vector<std::byte>> pages_;
  std::vector<const std::byte*> addresses_;
};

// The same rows, each anywhere, `offset` elements behind its address in a list that begins `first` rows
// earlier.
class ListedCopy {
 public:
  ListedCopy(const RowData& data, std::int64_t count, std::int64_t first, std::int64_t offset)
      : addresses_(size(first + count)) {
    const std::int64_t element = static_cast<std::int64_t>(verkv::size_bytes(data.rows.type));
    for (std::int64_t i = 0; i < count; ++i) {
      rows_.emplace_back(size((offset + data.rows.dim) * element));
      std::memcpy(rows_.back().data() + offset * element,
                  static_cast<const std::byte*>(data.rows.data) + i * data.rows.stride * element,
                  size(data.rows.dim * element));
      addresses_[size(first + i)] = rows_.back().data();
    }
    rows.type = data.rows.type;
    rows.dim = data.rows.dim;
    rows.first = first;
    rows.offset = offset;
    rows.list = addresses_.data();
  }
  ListedCopy(const ListedCopy&) = delete;
  ListedCopy& operator=(const ListedCopy&) = delete;

  Rows rows;

 private:
  std::vector<std::vector<std::byte>> rows_;
  std::vector<const std::byte*> addresses_;
};

// ---- Dispatch ----------------------------------------------------------------------------------

TEST_CASE("the vector kernels are those of this machine", "[kernels]") {
  const std::vector<const Kernels*> all = verkv::cpu::all_vector_kernels();
  std::set<std::string> names;
  for (const Kernels* kernels : all) names.insert(kernels->name);
  INFO("best: " << verkv::cpu::vector_kernels().name);
  CHECK(names.size() == all.size());
  CHECK(names.count("scalar") == 0);
  if (all.empty()) {
    CHECK(&verkv::cpu::vector_kernels() == &verkv::cpu::scalar_kernels());
  } else {
    CHECK(&verkv::cpu::vector_kernels() == all.front());
  }
#if defined(__x86_64__)
  // A build for one instruction set has only that one; other builds have all that the machine runs.
  const std::string best = verkv::cpu::vector_kernels().name;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) CHECK(best != "scalar");
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    CHECK(best != "AVX2");
#if !defined(__AVX2__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    CHECK(names.count("AVX2") == 1);
#endif
#endif
}

// ---- Vector against scalar ---------------------------------------------------------------------

void check_rows(DType type, std::int64_t count, int dim, int heads, bool indexed) {
  INFO("type " << verkv::name(type) << ", count " << count << ", dim " << dim << ", heads " << heads
               << ", indexed " << indexed);
  Random random(static_cast<std::uint32_t>(count * 131 + dim * 7 + heads));
  const std::int64_t stored = indexed ? 2 * count + 3 : count;
  const RowData data =
      random_rows(random, type, stored, dim, dim + static_cast<int>(random.below(3)));
  std::vector<std::uint32_t> index(size(count));
  for (std::uint32_t& i : index) i = random.below(static_cast<std::uint32_t>(stored));
  const std::uint32_t* list = indexed ? index.data() : nullptr;

  const std::int64_t q_stride = whole_groups(dim);
  std::vector<float> q(size(heads * q_stride), 0.0f);
  for (int h = 0; h < heads; ++h) {
    for (int j = 0; j < dim; ++j)
      q[size(h * q_stride + j)] = static_cast<float>(random.uniform(-2, 2));
  }
  const std::int64_t stride = count + 5;
  std::vector<float> c(size(heads * stride));
  for (float& x : c) x = random.one_in(8) ? 0.0f : static_cast<float>(random.uniform(-1, 1));

  const std::vector<float> start_dots(size(heads * stride), 7.0f);
  const std::int64_t out_stride = dim + 3;
  std::vector<float> start_sums(size(heads * out_stride));
  for (float& x : start_sums) x = static_cast<float>(random.uniform(-1, 1));

  const PagedCopy in_pages(data, stored, static_cast<std::int64_t>(random.below(70)),
                           indexed ? dim : 0);
  const ListedCopy in_a_list(data, stored, static_cast<std::int64_t>(random.below(70)),
                             indexed ? dim : 0);
  const Rows* rows = &data.rows;
  const auto run = [&](const Kernels& kernels, std::vector<float>& dots, std::vector<float>& sums) {
    dots = start_dots;
    sums = start_sums;
    kernels.dot_rows(*rows, list, count, q.data(), heads, q_stride, dots.data(), stride);
    kernels.weighted_rows(*rows, list, count, c.data(), heads, stride, sums.data(), out_stride);
  };
  std::vector<float> expected_dots, expected_sums;
  run(verkv::cpu::scalar_kernels(), expected_dots, expected_sums);
  std::vector<const Kernels*> all = verkv::cpu::all_vector_kernels();
  all.push_back(&verkv::cpu::scalar_kernels());
  for (const Rows* lie : {&data.rows, &in_pages.rows, &in_a_list.rows}) {
    rows = lie;
    for (const Kernels* kernels : all) {
      INFO(kernels->name << (lie == &data.rows       ? ""
                             : lie == &in_pages.rows ? ", in pages"
                                                     : ", in a list"));
      std::vector<float> dots, sums;
      run(*kernels, dots, sums);
      check_same("dot_rows", expected_dots, dots);
      check_same("weighted_rows", expected_sums, sums);
    }
  }
}

TEST_CASE("rows: vectors give the bits of the scalar kernels", "[kernels]") {
  const std::vector<DType> types = {DType::f32, DType::f16, DType::bf16};
  SECTION("every dim, type and number of heads") {
    for (const int dim : kDims) {
      for (const DType type : types) {
        for (int heads = 1; heads <= verkv::cpu::kMaxHeads; ++heads) {
          check_rows(type, 37, dim, heads, heads % 2 == 0);
        }
      }
    }
  }
  SECTION("every count") {
    for (const std::int64_t count : kCounts) {
      for (const int heads : {1, 3, 4}) {
        check_rows(DType::f16, count, 64, heads, false);
        check_rows(DType::f16, count, 36, heads, true);
      }
    }
  }
  SECTION("tiny products keep the sign of a zero sum") {
    const std::vector<float> row(21, 1e-30f);
    const std::vector<float> q(32, -1e-30f);
    const Rows rows{row.data(), DType::f32, 21, 21};
    float expected = 0;
    verkv::cpu::scalar_kernels().dot_rows(rows, nullptr, 1, q.data(), 1, 32, &expected, 1);
    REQUIRE(bits(expected) == 0x80000000u);
    for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
      INFO(kernels->name);
      float actual = 0;
      kernels->dot_rows(rows, nullptr, 1, q.data(), 1, 32, &actual, 1);
      CHECK(bits(actual) == bits(expected));
    }
  }
  SECTION("NaN and infinity pass through") {
    std::vector<Half> row(32, Half{0x3c00});
    row[5] = Half{0x7e00};
    row[16 + 9] = Half{0x7c00};
    const Rows rows{row.data(), DType::f16, 16, 16};
    const std::vector<float> q(16, 1.0f);
    const std::vector<float> c(2, 1.0f);
    for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
      INFO(kernels->name);
      float dots[2] = {};
      kernels->dot_rows(rows, nullptr, 2, q.data(), 1, 16, dots, 2);
      CHECK(std::isnan(dots[0]));
      CHECK(dots[1] == kInfinity);
      std::vector<float> sums(16, 0.0f);
      kernels->weighted_rows(rows, nullptr, 2, c.data(), 1, 2, sums.data(), 16);
      for (int j = 0; j < 16; ++j) {
        CHECK(std::isnan(sums[size(j)]) == (j == 5));
        CHECK((sums[size(j)] == kInfinity) == (j == 9));
      }
    }
  }
}

// One call of sketch_logits and its inputs.
struct SketchCase {
  verkv::SketchShape shape;
  std::vector<std::uint8_t> codes;
  std::vector<Positive16> scale;
  std::vector<Positive16> odds;
  std::int64_t count = 0;
  int heads = 0;
  std::int64_t q_stride = 0;
  std::vector<std::int8_t> q;
  std::vector<HeadConstants> constants;
  std::int64_t out_stride = 0;

  SketchCase(int dim, int fine, std::int64_t tokens, int query_heads, bool with_nan) {
    Random random(static_cast<std::uint32_t>(dim * 1009 + tokens * 17 + query_heads * 5 + fine));
    shape = {verkv::SketchKind::calibrated, dim, fine};
    count = tokens;
    heads = query_heads;
    // Any byte is a code.
    codes.resize(size(verkv::code_storage_bytes(shape, count)));
    for (std::uint8_t& x : codes) x = static_cast<std::uint8_t>(random.below(256));
    odds = random_odds(random, count);
    scale.resize(odds.size(), Positive16{0xffff});
    for (std::int64_t i = 0; i < count; ++i) {
      scale[size(i)] = random.one_in(16)
                           ? Positive16{0}
                           : verkv::to_positive16(static_cast<float>(random.uniform(0, 3)));
      if (with_nan && random.one_in(8)) scale[size(i)] = verkv::to_positive16(kNaN);
    }
    q_stride = shape.padded_dim() + 1;
    q.resize(size(heads * q_stride), std::int8_t{99});
    for (int h = 0; h < heads; ++h) {
      HeadConstants head;
      for (int j = 0; j < shape.padded_dim(); ++j) {
        const int extreme = random.one_in(2) ? 127 : -127;
        const int x = j >= dim           ? 0
                      : random.one_in(4) ? extreme
                                         : static_cast<int>(random.below(255)) - 127;
        q[size(h * q_stride + j)] = static_cast<std::int8_t>(x);
        head.query_sum += x;
      }
      head.factor = static_cast<float>(random.uniform(1e-4, 1e-2));
      head.shift = static_cast<float>(random.uniform(-1, 1));
      constants.push_back(head);
    }
    out_stride = whole_groups(count) + 16;
  }

  void run(const Kernels& kernels, std::vector<float>& out, std::vector<float>& largest) const {
    out.assign(size(heads * out_stride), 7.0f);
    largest.assign(size(heads), 7.0f);
    kernels.sketch_logits(shape, codes.data(), scale.data(), odds.data(), count, q.data(), heads,
                          q_stride, constants.data(), out.data(), out_stride, largest.data());
    // What lies past count is nobody's.
    for (int h = 0; h < heads; ++h) {
      std::fill(out.begin() + h * out_stride + count, out.begin() + (h + 1) * out_stride, 7.0f);
    }
  }
};

void check_sketch(int dim, int fine, std::int64_t count, int heads, bool with_nan) {
  INFO("dim " << dim << ", fine " << fine << ", count " << count << ", heads " << heads);
  const SketchCase test(dim, fine, count, heads, with_nan);
  std::vector<float> expected, expected_largest;
  test.run(verkv::cpu::scalar_kernels(), expected, expected_largest);
  for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
    INFO(kernels->name);
    std::vector<float> out, largest;
    test.run(*kernels, out, largest);
    check_same("logits", expected, out);
    check_same("largest", expected_largest, largest);
  }
}

TEST_CASE("sketch_logits: vectors give the bits of the scalar kernel", "[kernels]") {
  SECTION("every split into coordinates of 4 and of 2 bits, every number of heads") {
    for (const int dim : kDims) {
      for (int heads = 1; heads <= verkv::cpu::kMaxHeads; ++heads) {
        for (int fine = 0; fine < dim; fine += 16) check_sketch(dim, fine, 53, heads, heads == 5);
        check_sketch(dim, dim, 53, heads, heads == 5);
      }
    }
  }
  SECTION("every count") {
    for (const std::int64_t count : kCounts) {
      for (const int fine : {0, 16, 48}) check_sketch(48, fine, count, 3, false);
      for (const int fine : {0, 16, 28}) check_sketch(28, fine, count, 1, true);
    }
  }
  SECTION("dims past the tables of the vector kernels") {
    check_sketch(1024, 0, 33, 4, false);
    check_sketch(1024, 1024, 33, 3, false);
    check_sketch(1025, 512, 33, 2, false);
    check_sketch(576, 576, 70, 2, false);
  }
  SECTION("no token with finite odds") {
    SketchCase test(64, 16, 40, 2, false);
    for (Positive16& x : test.odds) x = verkv::kPositive16Infinity;
    for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
      INFO(kernels->name);
      std::vector<float> out, largest;
      test.run(*kernels, out, largest);
      CHECK(largest == std::vector<float>(2, -kInfinity));
    }
  }
  SECTION("a largest logit of 0 has no sign") {
    SketchCase test(16, 0, 16, 1, false);
    for (Positive16& x : test.odds) x = Positive16{0};
    for (Positive16& x : test.scale) x = Positive16{0};
    test.constants[0].shift = -0.0f;
    std::vector<float> out, expected;
    test.run(verkv::cpu::scalar_kernels(), out, expected);
    CHECK(bits(expected[0]) == 0);
    for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
      INFO(kernels->name);
      std::vector<float> largest;
      test.run(*kernels, out, largest);
      CHECK(bits(largest[0]) == 0);
    }
  }
}

TEST_CASE("weights: vectors give the bits of the scalar kernel", "[kernels]") {
  for (const std::int64_t count : kCounts) {
    for (int heads = 1; heads <= verkv::cpu::kMaxHeads; ++heads) {
      for (const bool with_nan : {false, true}) {
        if (count > 1025 && heads > 4) continue;
        INFO("count " << count << ", heads " << heads << ", NaN " << with_nan);
        Random random(static_cast<std::uint32_t>(count * 8 + heads));
        const std::vector<Positive16> odds = random_odds(random, count);
        const std::int64_t stride = count + 3;
        std::vector<float> start(size(heads * stride), 5.0f);
        std::vector<float> shift(size(heads));
        for (int h = 0; h < heads; ++h) {
          shift[size(h)] = h == 0 ? 0.0f : static_cast<float>(random.uniform(-20, 20));
          for (std::int64_t i = 0; i < count; ++i) {
            float& x = start[size(h * stride + i)];
            x = static_cast<float>(random.uniform(-40, 25));
            switch (random.below(64)) {
              case 0:
                x = -kInfinity;
                break;
              case 1:
                x = kInfinity;
                break;
              case 2:
                x = -87.0f;
                break;
              case 3:
                x = std::nextafter(-87.0f, -100.0f);
                break;
              case 4:
                x = 60.0f;
                break;
              case 5:
                x = std::nextafter(60.0f, 100.0f);
                break;
              case 6:
                x = static_cast<float>(random.uniform(-100, 100));
                break;
              case 7:
                x = with_nan ? kNaN : 0.0f;
                break;
              case 8:
                x = with_nan ? std::bit_cast<float>(0xffc001ffu) : -0.0f;
                break;
              default:
                break;
            }
          }
        }
        const auto run = [&](const Kernels& kernels, std::vector<float>& w,
                             std::vector<double>& sum) {
          w = start;
          sum.assign(size(heads), 0.0);
          kernels.weights(w.data(), stride, odds.data(), count, heads, shift.data(), sum.data());
        };
        std::vector<float> expected;
        std::vector<double> expected_sum;
        run(verkv::cpu::scalar_kernels(), expected, expected_sum);
        for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
          INFO(kernels->name);
          std::vector<float> w;
          std::vector<double> sum;
          run(*kernels, w, sum);
          check_same("weights", expected, w);
          check_same("sums", expected_sum, sum);
        }
      }
    }
  }
}

// ---- Clusters -----------------------------------------------------------------------------------

TEST_CASE("cluster_sums: vectors give the bits of the scalar kernel", "[kernels]") {
  for (const std::int64_t count : kCounts) {
    for (const bool with_nan : {false, true}) {
      INFO("count " << count << ", NaN " << with_nan);
      Random random(static_cast<std::uint32_t>(count * 2 + with_nan));
      const std::vector<Positive16> odds = random_odds(random, count);
      const std::vector<float> w = random_weights(random, odds, count, 1, count, with_nan);
      const std::int64_t clusters = verkv::clusters_of(count);
      const auto run = [&](const Kernels& kernels) {
        // What follows the last cluster is not touched.
        std::vector<float> out(size(2 * clusters + 2), -3.0f);
        kernels.cluster_sums(w.data(), count, out.data(), out.data() + clusters + 1);
        return out;
      };
      const std::vector<float> expected = run(verkv::cpu::scalar_kernels());
      CHECK(expected[size(clusters)] == -3.0f);
      for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
        INFO(kernels->name);
        check_same("sums", expected, run(*kernels));
      }
      // Against a plain sum.
      for (std::int64_t c = 0; c < clusters && !with_nan; ++c) {
        double sum = 0;
        for (std::int64_t k = 64 * c; k < std::min(count, 64 * c + 64); ++k)
          sum += static_cast<double>(w[size(k)]);
        CHECK(std::fabs(sum - static_cast<double>(expected[size(c)])) <= verkv::kSumError * sum);
      }
    }
  }
}

TEST_CASE("cluster_terms and cluster_counts: vectors give the bits of the scalar kernels",
          "[kernels]") {
  struct Answer {
    std::vector<float> x, y, counts;
    std::vector<double> sums;
    float top = 0;
  };
  for (const std::int64_t count : kCounts) {
    for (const float cap : {1.0f, 2.0f, kInfinity}) {
      for (const float beta : {0.0f, 1e-3f, 0.5f}) {
        INFO("count " << count << ", cap " << cap << ", beta " << beta);
        Random random(static_cast<std::uint32_t>(count * 16) + std::bit_cast<std::uint32_t>(beta));
        const std::vector<Positive16> odds = random_odds(random, count);
        std::vector<float> rho;
        for (std::int64_t i = 0; i < count; ++i) rho.push_back(verkv::to_float(odds[size(i)]));
        const std::vector<float> sketched = random_weights(random, odds, count, 1, count, true);
        const std::vector<float> exact = random_weights(random, odds, count, 1, count, false);
        std::vector<float> marked = sketched;
        std::vector<std::uint32_t> cluster;
        for (std::int64_t i = 0; i < count; ++i) {
          if (rho[size(i)] == kInfinity || random.one_in(5)) marked[size(i)] = -1;
          if (rho[size(i)] == 0) marked[size(i)] = -1;  // never drawn
          cluster.push_back(static_cast<std::uint32_t>(i / 5));
        }
        std::vector<float> share(size(count / 5 + 1));
        std::vector<float> spread(share.size());
        for (float& x : share) x = static_cast<float>(random.uniform(0, 3));
        for (float& x : spread) x = static_cast<float>(random.uniform(0, 2));
        const auto run = [&](const Kernels& kernels) {
          Answer a;
          a.x.assign(size(count + 1), -3.0f);
          a.y = a.x;
          a.counts = marked;
          a.sums.assign(4, -1.0);
          kernels.cluster_terms(marked.data(), exact.data(), rho.data(), count, beta, cap,
                                a.x.data(), a.y.data(), a.sums[0], a.sums[1]);
          kernels.cluster_counts(a.y.data(), cluster.data(), share.data(), spread.data(), count,
                                 a.counts.data(), a.sums[2], a.sums[3], a.top);
          return a;
        };
        const Answer expected = run(verkv::cpu::scalar_kernels());
        CHECK(expected.x.back() == -3.0f);
        for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
          INFO(kernels->name);
          const Answer actual = run(*kernels);
          check_same("x", expected.x, actual.x);
          check_same("y", expected.y, actual.y);
          check_same("counts", expected.counts, actual.counts);
          check_same("sums", expected.sums, actual.sums);
          CHECK(same(expected.top, actual.top));
        }
        // From the formulas.
        double plain = 0;
        double known = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          const float w = marked[size(i)];
          const float v = exact[size(i)];
          float x = 0;
          float y = 0;
          if (w >= 0) {
            x = std::max(0.0f, w * verkv::drawn_coefficient(w, w, rho[size(i)], beta, cap) - w);
            const float cv = v * verkv::drawn_coefficient(w, v, rho[size(i)], beta, cap);
            y = std::max(0.0f, std::min(cv, 1e30f) - v);
            plain += static_cast<double>(std::min(cv, 1e30f));
            known += static_cast<double>(v);
          }
          REQUIRE(same(expected.x[size(i)], x));
          REQUIRE(same(expected.y[size(i)], y));
        }
        CHECK(std::fabs(plain - expected.sums[0]) <= verkv::kSumError * plain);
        CHECK(std::fabs(known - expected.sums[1]) <= verkv::kSumError * known);
      }
    }
  }
}

TEST_CASE("weights: the vector exponential is weight_exp everywhere", "[kernels]") {
  // A stride through all positive and negative binary32 numbers.
  std::vector<float> x;
  for (std::uint64_t u = 0; u < (std::uint64_t{1} << 32); u += 65521 * 4) {
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(u)));
  }
  for (int i = -900000; i <= 650000; i += 7) x.push_back(static_cast<float>(i) * 1e-4f);
  const std::int64_t count = static_cast<std::int64_t>(x.size());
  const std::vector<Positive16> odds(size(whole_groups(count)), Positive16{0});
  std::vector<float> expected;
  for (const float v : x) expected.push_back(verkv::weight_exp(v - 0.0f));
  for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
    INFO(kernels->name);
    std::vector<float> w = x;
    const float shift = 0;
    double sum = 0;
    kernels->weights(w.data(), count, odds.data(), count, 1, &shift, &sum);
    check_same("weights", expected, w);
  }
}

TEST_CASE("sums over tokens: vectors give the bits of the scalar kernels", "[kernels]") {
  for (const std::int64_t count : kCounts) {
    for (int heads = 1; heads <= verkv::cpu::kMaxHeads; ++heads) {
      for (std::uint32_t seed = 0; seed < 4; ++seed) {
        if (count > 1025 && (heads > 4 || seed > 0)) continue;
        INFO("count " << count << ", heads " << heads << ", seed " << seed);
        Random random(static_cast<std::uint32_t>(count * 64 + heads * 4) + seed);
        const std::vector<Positive16> odds = random_odds(random, count);
        const std::int64_t stride = count + 3;
        const std::vector<float> w =
            random_weights(random, odds, count, heads, stride, seed % 2 == 1);
        const std::vector<float> beta = random_betas(random, heads);
        std::vector<double> expected_weight(size(heads)), expected_odds(size(heads)),
            expected_variance(size(heads));
        std::vector<float> expected_jump(size(heads));
        const Kernels& scalar = verkv::cpu::scalar_kernels();
        scalar.beta_sums(w.data(), stride, odds.data(), count, heads, beta.data(),
                         expected_weight.data(), expected_odds.data());
        scalar.tail_sums(w.data(), stride, odds.data(), count, heads, beta.data(),
                         expected_variance.data(), expected_jump.data());
        for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
          INFO(kernels->name);
          std::vector<double> weight(size(heads)), rho(size(heads)), variance(size(heads));
          std::vector<float> jump(size(heads));
          kernels->beta_sums(w.data(), stride, odds.data(), count, heads, beta.data(),
                             weight.data(), rho.data());
          kernels->tail_sums(w.data(), stride, odds.data(), count, heads, beta.data(),
                             variance.data(), jump.data());
          check_same("weight", expected_weight, weight);
          check_same("odds", expected_odds, rho);
          check_same("variance", expected_variance, variance);
          check_same("jump", expected_jump, jump);
        }
      }
    }
  }
}

TEST_CASE("select_tokens: vectors choose the tokens of the scalar kernel", "[kernels]") {
  for (const std::int64_t count : kCounts) {
    for (int heads = 1; heads <= verkv::cpu::kMaxHeads; ++heads) {
      for (std::uint32_t seed = 0; seed < 6; ++seed) {
        if (count > 1025 && (heads > 4 || seed > 1)) continue;
        INFO("count " << count << ", heads " << heads << ", seed " << seed);
        Random random(static_cast<std::uint32_t>(count * 64 + heads * 8) + seed);
        const std::vector<Positive16> odds = random_odds(random, count);
        const std::int64_t stride = count + 3;
        const std::vector<float> w =
            random_weights(random, odds, count, heads, stride, seed % 2 == 1);
        const std::vector<float> beta = random_betas(random, heads);
        std::vector<float> worth_threshold(size(heads)), weight_threshold(size(heads));
        for (int h = 0; h < heads; ++h) {
          // From nearly all tokens to none; sometimes exactly what one token is worth.
          worth_threshold[size(h)] =
              static_cast<float>(std::exp(random.uniform(-20, static_cast<double>(seed) * 4 - 10)));
          if (count > 0 && random.one_in(3)) {
            const std::uint32_t i = random.below(static_cast<std::uint32_t>(count));
            worth_threshold[size(h)] = verkv::fetch_worth(w[size(h * stride) + i],
                                                          verkv::to_float(odds[i]), beta[size(h)]);
          }
          if (random.one_in(8)) worth_threshold[size(h)] = 0;
          if (random.one_in(12)) worth_threshold[size(h)] = -1;
          if (random.one_in(12)) worth_threshold[size(h)] = kInfinity;
          weight_threshold[size(h)] =
              random.one_in(3) ? kInfinity : static_cast<float>(std::exp(random.uniform(-6, 4)));
          if (random.one_in(12)) weight_threshold[size(h)] = random.one_in(2) ? 0.0f : -2.0f;
        }
        const auto run = [&](const Kernels& kernels, std::vector<std::uint32_t>& out,
                             std::vector<std::int64_t>& planned) {
          out.assign(size(count + 16), 0xffffffffu);
          planned.assign(size(heads), 1000);
          const std::int64_t found = kernels.select_tokens(
              w.data(), stride, odds.data(), 3, count, heads, beta.data(), worth_threshold.data(),
              weight_threshold.data(), out.data(), planned.data());
          REQUIRE(found <= count);
          out.resize(size(found));
        };
        std::vector<std::uint32_t> expected;
        std::vector<std::int64_t> expected_planned;
        run(verkv::cpu::scalar_kernels(), expected, expected_planned);
        for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
          INFO(kernels->name);
          std::vector<std::uint32_t> out;
          std::vector<std::int64_t> planned;
          run(*kernels, out, planned);
          check_same("tokens", expected, out);
          check_same("planned", expected_planned, planned);
        }
      }
    }
  }
}

TEST_CASE("a sketch in pieces gives the bits of one call", "[kernels]") {
  std::vector<const Kernels*> all = verkv::cpu::all_vector_kernels();
  all.push_back(&verkv::cpu::scalar_kernels());
  const std::int64_t count = 5 * verkv::kBlockTokens + 133;
  for (const int heads : {1, 3, 8}) {
    Random random(static_cast<std::uint32_t>(heads));
    const std::vector<Positive16> odds = random_odds(random, count);
    const std::int64_t stride = count + 3;
    const std::vector<float> start = random_weights(random, odds, count, heads, stride, false);
    const std::vector<float> beta = random_betas(random, heads);
    const std::vector<float> shift(size(heads), 1.5f);
    const std::vector<float> worth(size(heads), 1e-3f), weight(size(heads), kInfinity);
    // Where pieces end, in blocks.
    const std::vector<std::vector<std::int64_t>> cuts = {
        {6}, {1, 6}, {2, 3, 6}, {1, 2, 3, 4, 5, 6}};
    for (const Kernels* kernels : all) {
      INFO(kernels->name << ", heads " << heads);
      struct Result {
        std::vector<float> w, jump;
        std::vector<double> sum, beta_weight, beta_odds, variance;
        std::vector<std::uint32_t> selected, planned_place;
        std::vector<std::int64_t> planned;
        std::vector<float> planned_worth;
      };
      const auto run = [&](const std::vector<std::int64_t>& ends) {
        Result r;
        r.w = start;
        for (auto* sums : {&r.sum, &r.beta_weight, &r.beta_odds, &r.variance})
          sums->assign(size(heads), 0.0);
        r.jump.assign(size(heads), 0.0f);
        r.selected.resize(size(count + 16));
        r.planned.assign(size(heads), 0);
        const auto each_piece = [&](auto&& f) {
          std::int64_t at = 0;
          for (const std::int64_t end : ends) {
            const std::int64_t next = std::min(count, end * verkv::kBlockTokens);
            f(at, next - at);
            at = next;
          }
        };
        std::int64_t found = 0;
        each_piece([&](std::int64_t at, std::int64_t n) {
          kernels->beta_sums(start.data() + at, stride, odds.data() + at, n, heads, beta.data(),
                             r.beta_weight.data(), r.beta_odds.data());
          kernels->tail_sums(start.data() + at, stride, odds.data() + at, n, heads, beta.data(),
                             r.variance.data(), r.jump.data());
          found += kernels->select_tokens(start.data() + at, stride, odds.data() + at, at, n, heads,
                                          beta.data(), worth.data(), weight.data(),
                                          r.selected.data() + found, r.planned.data());
        });
        r.selected.resize(size(found));
        std::vector<float> w(size(count + 16)), rho(w), gain(w);
        std::vector<std::uint32_t> place(w.size());
        PlanArrays plan{w.data(), rho.data(), gain.data(), place.data(), 0};
        each_piece([&](std::int64_t at, std::int64_t n) {
          kernels->plan_start(start.data() + at, odds.data() + at, at, n, beta[0], plan);
        });
        r.planned_worth.assign(gain.begin(), gain.begin() + plan.count);
        r.planned_place.assign(place.begin(), place.begin() + plan.count);
        each_piece([&](std::int64_t at, std::int64_t n) {
          kernels->weights(r.w.data() + at, stride, odds.data() + at, n, heads, shift.data(),
                           r.sum.data());
        });
        return r;
      };
      const Result whole = run(cuts[0]);
      CHECK(whole.selected.size() > 10);
      CHECK(whole.planned_place.size() > 10);
      for (const std::vector<std::int64_t>& ends : cuts) {
        const Result cut = run(ends);
        check_same("weights", whole.w, cut.w);
        check_same("sum", whole.sum, cut.sum);
        check_same("sum of weights above beta", whole.beta_weight, cut.beta_weight);
        check_same("sum of odds above beta", whole.beta_odds, cut.beta_odds);
        check_same("variance", whole.variance, cut.variance);
        check_same("jump", whole.jump, cut.jump);
        check_same("selected", whole.selected, cut.selected);
        check_same("planned", whole.planned, cut.planned);
        check_same("place", whole.planned_place, cut.planned_place);
        check_same("worth", whole.planned_worth, cut.planned_worth);
      }
    }
  }
}

// A plan with its memory.
struct Plan {
  std::vector<float> weight, odds, worth;
  std::vector<std::uint32_t> place;
  PlanArrays arrays;

  explicit Plan(std::int64_t count)
      : weight(size(count + 16), -1.0f),
        odds(size(count + 16), -1.0f),
        worth(size(count + 16), -1.0f),
        place(size(count + 16), 0xffffffffu),
        arrays{weight.data(), odds.data(), worth.data(), place.data(), 0} {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  template <class T>
  std::vector<T> used(const std::vector<T>& from) const {
    return {from.begin(), from.begin() + static_cast<std::ptrdiff_t>(arrays.count)};
  }
};

void check_same_plan(const char* what, const Plan& expected, const Plan& actual) {
  INFO(what);
  REQUIRE(expected.arrays.count == actual.arrays.count);
  check_same("weight", expected.used(expected.weight), actual.used(actual.weight));
  check_same("odds", expected.used(expected.odds), actual.used(actual.odds));
  check_same("worth", expected.used(expected.worth), actual.used(actual.worth));
  check_same("place", expected.used(expected.place), actual.used(actual.place));
}

TEST_CASE("the search's arrays: vectors give the bits of the scalar kernels", "[kernels]") {
  for (const std::int64_t count : kCounts) {
    for (std::uint32_t seed = 0; seed < 24; ++seed) {
      if (count > 1025 && seed > 5) continue;
      INFO("count " << count << ", seed " << seed);
      Random random(static_cast<std::uint32_t>(count * 64) + seed);
      const std::vector<Positive16> odds = random_odds(random, count);
      const std::vector<float> w = random_weights(random, odds, count, 1, count, seed % 2 == 1);
      const float beta = random_betas(random, 1)[0];
      const float threshold =
          random.one_in(4) ? kInfinity : static_cast<float>(std::exp(random.uniform(-20, 6)));
      const float low = beta * static_cast<float>(random.uniform(0, 1));
      const float settle = threshold * static_cast<float>(random.uniform(0, 1));

      struct Result {
        std::vector<double> sums;
        std::vector<float> tops;
      };
      const auto run = [&](const Kernels& kernels, Plan& start, Plan& plan, Result& result) {
        SettledTerms settled;
        settled.above_weight = 1;
        settled.above_odds = 2;
        settled.above_largest_odds = seed % 3 == 0 ? 100.0f : 0.0f;
        settled.below_variance = 3;
        kernels.plan_start(w.data(), odds.data(), 5, count, beta, start.arrays);
        kernels.plan_start(w.data(), odds.data(), 5, count, beta, plan.arrays);
        for (int round = 0; round < 3; ++round) {
          double weight = -1, rho = -1, variance = -1;
          float jump = -1;
          kernels.plan_beta_sums(plan.arrays, threshold, beta, weight, rho);
          kernels.plan_tail_sums(plan.arrays, threshold, beta, variance, jump);
          const float shrink = 1 / static_cast<float>(1 + round);
          kernels.plan_compact(plan.arrays, threshold * shrink, settle * shrink, low,
                               round == 0 ? kInfinity : beta, settled);
          result.sums.insert(result.sums.end(), {weight, rho, variance, settled.above_weight,
                                                 settled.above_odds, settled.below_variance});
          result.tops.insert(result.tops.end(),
                             {jump, settled.above_largest_odds, settled.below_jump});
        }
      };
      Plan expected_start(count), expected_plan(count);
      Result expected;
      run(verkv::cpu::scalar_kernels(), expected_start, expected_plan, expected);
      for (const Kernels* kernels : verkv::cpu::all_vector_kernels()) {
        INFO(kernels->name);
        Plan start(count), plan(count);
        Result result;
        run(*kernels, start, plan, result);
        check_same_plan("after plan_start", expected_start, start);
        check_same_plan("after plan_compact", expected_plan, plan);
        check_same("sums", expected.sums, result.sums);
        check_same("largest", expected.tops, result.tops);
      }
    }
  }
}

// ---- Scalar against plain loops ----------------------------------------------------------------

void check_near(const char* what, double expected, double actual, double tolerance) {
  INFO(what << ": " << actual << ", expected " << expected << " within " << tolerance);
  CHECK(std::fabs(actual - expected) <= tolerance);
}

TEST_CASE("scalar rows agree with double", "[kernels]") {
  const Kernels& scalar = verkv::cpu::scalar_kernels();
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int dim : kDims) {
      Random random(static_cast<std::uint32_t>(dim));
      const std::int64_t count = 300;
      const int heads = 2;
      const RowData data = random_rows(random, type, count, dim, dim);
      std::vector<std::uint32_t> index(size(count));
      for (std::uint32_t& i : index) i = random.below(static_cast<std::uint32_t>(count));
      const std::int64_t q_stride = whole_groups(dim);
      std::vector<float> q(size(heads * q_stride), 0.0f);
      for (int h = 0; h < heads; ++h) {
        for (int j = 0; j < dim; ++j)
          q[size(h * q_stride + j)] = static_cast<float>(random.uniform(-2, 2));
      }
      std::vector<float> dots(size(heads * count)), sums(size(heads * dim), 1.0f);
      scalar.dot_rows(data.rows, index.data(), count, q.data(), heads, q_stride, dots.data(),
                      count);
      scalar.weighted_rows(data.rows, index.data(), count, dots.data(), heads, count, sums.data(),
                           dim);
      for (int h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < count; ++i) {
          double dot = 0, magnitude = 0;
          for (int j = 0; j < dim; ++j) {
            const double term = static_cast<double>(q[size(h * q_stride + j)]) *
                                static_cast<double>(data.at(index[size(i)], j));
            dot += term;
            magnitude += std::fabs(term);
          }
          // One rounding a fused step of a lane, four in the fold.
          const double roundings = static_cast<double>(dim / 16 + 1 + 4);
          check_near("dot", dot, static_cast<double>(dots[size(h * count + i)]),
                     1.01 * roundings * kRound * magnitude);
        }
        for (int j = 0; j < dim; ++j) {
          double sum = 1, magnitude = 1;
          for (std::int64_t i = 0; i < count; ++i) {
            const double term = static_cast<double>(dots[size(h * count + i)]) *
                                static_cast<double>(data.at(index[size(i)], j));
            sum += term;
            magnitude += std::fabs(term);
          }
          // 256 steps in the longest block, one more for each of the two blocks.
          check_near("weighted sum", sum, static_cast<double>(sums[size(h * dim + j)]),
                     1.01 * 258 * kRound * magnitude);
        }
      }
    }
  }
}

TEST_CASE("scalar sketch logits agree with double", "[kernels]") {
  for (const int dim : kDims) {
    for (const int fine : {0, dim / 3 / 16 * 16, dim}) {
      INFO("dim " << dim << ", fine " << fine);
      const SketchCase test(dim, fine, 50, 2, false);
      std::vector<float> out, largest;
      test.run(verkv::cpu::scalar_kernels(), out, largest);
      for (int h = 0; h < test.heads; ++h) {
        const HeadConstants& head = test.constants[size(h)];
        double top = -static_cast<double>(kInfinity);
        for (std::int64_t i = 0; i < test.count; ++i) {
          // The level of a code in steps of a byte, from the planes as sketch.hpp lays them out.
          std::int64_t dot = 0;
          for (int j = 0; j < dim; ++j) {
            const std::size_t group = size(i / 16 * 16 * test.shape.code_bytes());
            const std::size_t lane = size(i % 16);
            const unsigned pair = static_cast<unsigned>(2 * (j % 4));
            unsigned code = (unsigned{test.codes[group + size(j / 4 * 16) + lane]} >> pair) & 3u;
            const std::size_t high = group + size(16 * ((test.shape.padded_dim() + 3) / 4));
            if (j < fine)
              code += 4 * ((unsigned{test.codes[high + size(j / 4 * 16) + lane]} >> pair) & 3u);
            const int level = verkv::kSketchLevels.byte_of(test.shape, j, code) - verkv::kLevelBias;
            dot += level * test.q[size(h * test.q_stride + j)];
          }
          const double scaled =
              static_cast<double>(verkv::to_float(test.scale[size(i)])) * static_cast<double>(dot);
          const double factor = static_cast<double>(head.factor);
          const double logit = factor * scaled + static_cast<double>(head.shift);
          // Two roundings of the product, one of the result.
          const double tolerance =
              1.01 * kRound * (2 * factor * std::fabs(scaled) + std::fabs(logit) + 1e-30);
          const float actual = out[size(h * test.out_stride + i)];
          check_near("logit", logit, static_cast<double>(actual), tolerance);
          if (test.odds[size(i)].bits < verkv::kPositive16Infinity.bits) {
            top = std::max(top, static_cast<double>(actual));
          }
        }
        CHECK(static_cast<double>(largest[size(h)]) == top);
      }
    }
  }
}

TEST_CASE("scalar sums agree with double", "[kernels]") {
  const Kernels& scalar = verkv::cpu::scalar_kernels();
  // A block has 32 additions a lane and 4 in the fold; the terms have at most 3 roundings of their
  // own.
  constexpr double kTolerance = 1.01 * (32 + 4 + 3) * kRound;
  for (const std::int64_t count : kCounts) {
    INFO("count " << count);
    Random random(static_cast<std::uint32_t>(count));
    const std::vector<Positive16> odds = random_odds(random, count);
    std::vector<float> w(size(count));
    for (float& x : w) x = static_cast<float>(random.uniform(-60, 10));
    const std::vector<float> logits = w;
    const float shift = 9.5f;
    double sum = 0;
    scalar.weights(w.data(), count, odds.data(), count, 1, &shift, &sum);
    double exact = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const bool finite = std::isfinite(verkv::to_float(odds[size(i)]));
      const double weight = finite ? std::exp(static_cast<double>(logits[size(i)] - shift)) : 0.0;
      check_near("weight", weight, static_cast<double>(w[size(i)]),
                 verkv::tolerance::kExponential * weight);
      exact += weight;
    }
    check_near("sum of weights", exact, sum, (kTolerance + verkv::tolerance::kExponential) * exact);

    for (const float beta : {0.0f, 1e-4f, 0.3f}) {
      // The branches are decided in binary32; the sums are then compared on the same tokens.
      double weight = 0, rho = 0, variance = 0, jump = 0;
      std::vector<double> worth;
      for (std::int64_t i = 0; i < count; ++i) {
        const float x = w[size(i)];
        const float odd = verkv::to_float(odds[size(i)]);
        if (!(x > 0)) continue;
        const bool in = x > beta * odd;
        const double wide = static_cast<double>(x);
        const double wide_odd = static_cast<double>(odd);
        const double wide_beta = static_cast<double>(beta);
        if (in) weight += wide;
        if (in) rho += wide_odd;
        variance += in ? wide_beta * wide_beta * wide_odd : wide * wide / wide_odd;
        jump = std::max(jump, (in ? wide_beta : wide / wide_odd) * std::max(wide_odd, 1.0));
        worth.push_back(in ? wide_beta * (2 * wide - wide_beta * wide_odd)
                           : wide * wide / wide_odd);
      }
      double out_weight = 0, out_odds = 0, out_variance = 0;
      float out_jump = 0;
      scalar.beta_sums(w.data(), count, odds.data(), count, 1, &beta, &out_weight, &out_odds);
      scalar.tail_sums(w.data(), count, odds.data(), count, 1, &beta, &out_variance, &out_jump);
      // Products below the normal numbers lose more than a relative error.
      const double tiny = static_cast<double>(count) * 1e-44;
      check_near("weight", weight, out_weight, kTolerance * weight);
      check_near("odds", rho, out_odds, kTolerance * rho);
      check_near("variance", variance, out_variance, kTolerance * variance + tiny);
      check_near("jump", jump, static_cast<double>(out_jump), 3 * kRound * jump + tiny);

      Plan plan(count);
      scalar.plan_start(w.data(), odds.data(), 0, count, beta, plan.arrays);
      REQUIRE(plan.arrays.count == static_cast<std::int64_t>(worth.size()));
      for (std::size_t i = 0; i < worth.size(); ++i) {
        check_near("worth", worth[i], static_cast<double>(plan.worth[i]),
                   4 * kRound * worth[i] + tiny + 1e-44);
      }
      double plan_weight = -1, plan_odds = -1, plan_variance = -1;
      float plan_jump = -1;
      scalar.plan_beta_sums(plan.arrays, kInfinity, beta, plan_weight, plan_odds);
      scalar.plan_tail_sums(plan.arrays, kInfinity, beta, plan_variance, plan_jump);
      check_near("plan weight", weight, plan_weight, kTolerance * weight);
      check_near("plan odds", rho, plan_odds, kTolerance * rho);
      check_near("plan variance", variance, plan_variance, kTolerance * variance + tiny);
      CHECK(plan_jump == out_jump);

      // With both ends at beta every token is settled, and that is the whole answer.
      SettledTerms settled;
      scalar.plan_compact(plan.arrays, kInfinity, kInfinity, beta, beta, settled);
      CHECK(plan.arrays.count == 0);
      check_near("settled weight", weight, settled.above_weight, kTolerance * weight);
      check_near("settled odds", rho, settled.above_odds, kTolerance * rho);
      const double all = settled.below_variance +
                         static_cast<double>(beta) * static_cast<double>(beta) * settled.above_odds;
      check_near("settled variance", variance, all, 2 * kTolerance * variance + tiny);
      const double settled_jump =
          std::max(static_cast<double>(beta) * static_cast<double>(settled.above_largest_odds),
                   static_cast<double>(settled.below_jump));
      check_near("settled jump", jump, settled_jump, 4 * kRound * jump + tiny);
    }
  }
}

}  // namespace
