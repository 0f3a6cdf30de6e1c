// Each instruction against plain C++, on random operands and on the edges of their types.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "arithmetic.hpp"
#include "catch.hpp"
#include "ptx_parser.hpp"
#include "test_support.hpp"

using namespace verkv::cpu_device;
using namespace verkv::cpu_device::test;

namespace {

using U64 = std::uint64_t;
using Operands = std::array<U64, 4>;
using Reference = std::function<U64(U64, U64, U64, U64)>;

// Runs `instruction` once a thread. Operands 1 to 4 are in %q1.. (64 bits), %r1.. (32), %h1.. (16),
// %f1.. and %d1.. (floats), %p1.. (predicates: the lowest bit); the result goes to the same letter
// with the number 0, and is that letter's.
std::vector<U64> run(const std::string& instruction, char result,
                     const std::vector<Operands>& operands, const MachineOptions& options = {}) {
  std::ostringstream ptx;
  ptx << ".entry apply(.param .u64 in, .param .u64 out) {\n"
         ".reg .pred %p<6>; .reg .b16 %h<6>; .reg .b32 %r<12>; .reg .f32 %f<6>; .reg .f64 %d<6>;\n"
         ".reg .b64 %q<6>; .reg .b64 %a<6>;\n"
         "ld.param.u64 %a1, [in]; ld.param.u64 %a2, [out];\n"
         "mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mad.lo.s32 %r10, %r11, 64, %r10;\n"
         "mul.wide.u32 %a3, %r10, 32; add.s64 %a1, %a1, %a3;\n"
         "mul.wide.u32 %a3, %r10, 8; add.s64 %a2, %a2, %a3;\n";
  for (int i = 1; i <= 4; ++i) {
    ptx << "ld.global.u64 %q" << i << ", [%a1+" << 8 * (i - 1) << "];\n"
        << "cvt.u32.u64 %r" << i << ", %q" << i << "; cvt.u16.u64 %h" << i << ", %q" << i << ";\n"
        << "mov.b32 %f" << i << ", %r" << i << "; mov.b64 %d" << i << ", %q" << i << ";\n"
        << "and.b32 %r9, %r" << i << ", 1; setp.ne.u32 %p" << i << ", %r9, 0;\n";
  }
  ptx << instruction << '\n';
  switch (result) {
    case 'r':
      ptx << "cvt.u64.u32 %q0, %r0;\n";
      break;
    case 'h':
      ptx << "cvt.u64.u16 %q0, %h0;\n";
      break;
    case 'f':
      ptx << "mov.b32 %r0, %f0; cvt.u64.u32 %q0, %r0;\n";
      break;
    case 'd':
      ptx << "mov.b64 %q0, %d0;\n";
      break;
    case 'p':
      ptx << "selp.u64 %q0, 1, 0, %p0;\n";
      break;
    default:
      break;
  }
  ptx << "st.global.u64 [%a2], %q0; ret; }\n";
  DeviceOptions device_options;
  device_options.machine = options;
  Device device(device_options);
  const auto kernel = device.load(module_of(ptx.str()))->find("apply");
  INFO(instruction);
  REQUIRE(kernel->unsupported().empty());
  std::vector<Operands> padded = operands;
  padded.resize((operands.size() + 63) / 64 * 64);
  const Address in = upload(device, padded);
  const Address out = allocate<U64>(device, padded.size());
  LaunchShape shape;
  shape.grid.x = static_cast<unsigned>(padded.size() / 64);
  shape.block.x = 64;
  CHECK(device.launch_with(kernel, shape, kLegacyStream, in, out) == Status::success);
  std::vector<U64> results = download<U64>(device, out, operands.size());
  INFO(first_fault(device));
  REQUIRE(device.faults().empty());
  return results;
}

std::vector<Operands> integers() {
  static const std::vector<Operands> all = [] {
    const std::vector<U64> edges = {0,
                                    1,
                                    2,
                                    31,
                                    32,
                                    33,
                                    63,
                                    64,
                                    255,
                                    0x7fff,
                                    0x8000,
                                    0xffff,
                                    0x7fffffff,
                                    0x80000000,
                                    0xffffffff,
                                    U64{1} << 32,
                                    ~(U64{1} << 63),
                                    U64{1} << 63,
                                    ~U64{0}};
    std::mt19937_64 random(1);
    std::vector<Operands> made;
    for (const U64 a : edges) {
      for (const U64 b : edges)
        made.push_back({a, b, edges[random() % edges.size()], random() % 40});
    }
    for (int i = 0; i < 400; ++i)
      made.push_back({random(), random() >> random() % 64, random(), random() % 64});
    return made;
  }();
  return all;
}

void check(const std::string& instruction, char result, const std::vector<Operands>& operands,
           const Reference& reference) {
  const std::vector<U64> found = run(instruction, result, operands);
  int wrong = 0;
  for (std::size_t i = 0; i < operands.size() && wrong < 3; ++i) {
    const auto& [a, b, c, d] = operands[i];
    const U64 expected = reference(a, b, c, d);
    if (found[i] == expected) continue;
    ++wrong;
    INFO(instruction << " of " << std::hex << a << ' ' << b << ' ' << c << ' ' << d);
    CHECK(found[i] == expected);
  }
  CHECK(wrong == 0);
}

std::uint32_t u32(U64 v) { return static_cast<std::uint32_t>(v); }
std::int32_t s32(U64 v) { return static_cast<std::int32_t>(v); }
std::int64_t s64(U64 v) { return static_cast<std::int64_t>(v); }
std::uint16_t u16(U64 v) { return static_cast<std::uint16_t>(v); }
std::int16_t s16(U64 v) { return static_cast<std::int16_t>(v); }
U64 low(std::int64_t v) { return u32(static_cast<U64>(v)); }

void check_integer(const std::string& instruction, char result, const Reference& reference) {
  check(instruction, result, integers(), reference);
}

std::vector<Operands> floats() {
  static const std::vector<Operands> all = [] {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> edges = {
        0.0F,          -0.0F,           1.0F,  -1.0F,    0.5F,      1e-40F,
        -1e-40F,       1.17549435e-38F, 3e38F, infinity, -infinity, std::nanf(""),
        65504.0F,      65520.0F,        6e-8F, 2.5F,     -3.5F,     16777217.0F,
        2147483648.0F, -2147483904.0F,  1e20F};
    std::mt19937 random(2);
    std::vector<Operands> made;
    const auto bits = [](float v) { return U64{std::bit_cast<std::uint32_t>(v)}; };
    for (const float a : edges) {
      for (const float b : edges)
        made.push_back({bits(a), bits(b), bits(edges[random() % edges.size()]), 0});
    }
    std::normal_distribution<float> normal;
    for (int i = 0; i < 300; ++i)
      made.push_back({bits(normal(random) * 10), bits(normal(random)), bits(normal(random)), 0});
    for (int i = 0; i < 300; ++i) made.push_back({random(), random(), random(), 0});
    return made;
  }();
  return all;
}

using FloatReference = std::function<float(float, float, float)>;

void check_float(const std::string& instruction, const FloatReference& reference) {
  check(instruction, 'f', floats(), [&](U64 a, U64 b, U64 c, U64) {
    const float result = reference(as_float(a), as_float(b), as_float(c));
    return std::isnan(result) ? U64{0x7fffffff} : from_float(result);
  });
}

std::vector<Operands> doubles() {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  std::vector<Operands> made;
  const auto bits = [](double v) { return std::bit_cast<U64>(v); };
  for (int i = 0; i < 200; ++i)
    made.push_back({bits(normal(random) * 1e3), bits(normal(random)), bits(normal(random)), 0});
  for (const double v : {0.0, -0.0, 1e300, -1e300, 0.5, 2.5, 4294967296.0, 1e19, -1e19})
    made.push_back({bits(v), bits(3.0), bits(-v), 0});
  return made;
}

void check_double(const std::string& instruction,
                  const std::function<double(double, double, double)>& reference) {
  check(instruction, 'd', doubles(), [&](U64 a, U64 b, U64 c, U64) {
    return from_double(reference(as_double(a), as_double(b), as_double(c)));
  });
}

}  // namespace

TEST_CASE("Integer arithmetic") {
  check_integer("add.s32 %r0, %r1, %r2;", 'r', [](U64 a, U64 b, U64, U64) { return u32(a + b); });
  check_integer("add.u64 %q0, %q1, %q2;", 'q', [](U64 a, U64 b, U64, U64) { return a + b; });
  check_integer("add.s16 %h0, %h1, %h2;", 'h', [](U64 a, U64 b, U64, U64) { return u16(a + b); });
  check_integer("add.sat.s32 %r0, %r1, %r2;", 'r', [](U64 a, U64 b, U64, U64) {
    return low(std::clamp<std::int64_t>(std::int64_t{s32(a)} + s32(b), INT32_MIN, INT32_MAX));
  });
  check_integer("sub.s32 %r0, %r1, %r2;", 'r', [](U64 a, U64 b, U64, U64) { return u32(a - b); });
  check_integer("sub.sat.s32 %r0, %r1, %r2;", 'r', [](U64 a, U64 b, U64, U64) {
    return low(std::clamp<std::int64_t>(std::int64_t{s32(a)} - s32(b), INT32_MIN, INT32_MAX));
  });
  check_integer("mul.lo.s32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return u32(a * b); });
  check_integer("mul.hi.u32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return U64{u32(a)} * u32(b) >> 32; });
  check_integer("mul.hi.s32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return low(std::int64_t{s32(a)} * s32(b) >> 32); });
  check_integer("mul.wide.s32 %q0, %r1, %r2;", 'q', [](U64 a, U64 b, U64, U64) {
    return static_cast<U64>(std::int64_t{s32(a)} * s32(b));
  });
  check_integer("mul.wide.u16 %r0, %h1, %h2;", 'r',
                [](U64 a, U64 b, U64, U64) { return U64{u32(U64{u16(a)} * u16(b))}; });
  check_integer("mul.lo.s64 %q0, %q1, %q2;", 'q', [](U64 a, U64 b, U64, U64) { return a * b; });
  check_integer("mul.hi.u64 %q0, %q1, %q2;", 'q', [](U64 a, U64 b, U64, U64) {
    // By halves, without a wider type.
    const U64 ll = U64{u32(a)} * u32(b), lh = U64{u32(a)} * (b >> 32), hl = (a >> 32) * u32(b),
              hh = (a >> 32) * (b >> 32);
    return hh + (lh >> 32) + (hl >> 32) + ((U64{u32(lh)} + u32(hl) + (ll >> 32)) >> 32);
  });
  check_integer("mad.lo.s32 %r0, %r1, %r2, %r3;", 'r',
                [](U64 a, U64 b, U64 c, U64) { return u32(a * b + c); });
  check_integer("mad.wide.u32 %q0, %r1, %r2, %q3;", 'q',
                [](U64 a, U64 b, U64 c, U64) { return U64{u32(a)} * u32(b) + c; });
  check_integer("mad.hi.s32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    return low((std::int64_t{s32(a)} * s32(b) >> 32) + s32(c));
  });
  check_integer("mul24.lo.u32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return u32((a & 0xffffff) * (b & 0xffffff)); });
  check_integer("mad24.lo.s32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    const auto part = [](U64 v) { return std::int64_t{s32(v << 8)} >> 8; };
    return low(part(a) * part(b) + s32(c));
  });
  check_integer("sad.s32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    return low(std::abs(std::int64_t{s32(a)} - s32(b)) + s32(c));
  });
  check_integer("div.u32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return u32(b) ? u32(a) / u32(b) : 0xffffffffU; });
  check_integer("div.s64 %q0, %q1, %q2;", 'q', [](U64 a, U64 b, U64, U64) {
    if (b == 0) return ~U64{0};
    return s64(b) == -1 ? 0 - a : static_cast<U64>(s64(a) / s64(b));
  });
  check_integer("rem.s32 %r0, %r1, %r2;", 'r', [](U64 a, U64 b, U64, U64) {
    if (u32(b) == 0) return U64{u32(a)};
    return s32(b) == -1 ? 0 : low(s32(a) % s32(b));
  });
  check_integer("rem.u64 %q0, %q1, %q2;", 'q',
                [](U64 a, U64 b, U64, U64) { return b ? a % b : a; });
  check_integer("min.s32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return low(std::min(s32(a), s32(b))); });
  check_integer("max.u64 %q0, %q1, %q2;", 'q',
                [](U64 a, U64 b, U64, U64) { return std::max(a, b); });
  check_integer("min.u16 %h0, %h1, %h2;", 'h',
                [](U64 a, U64 b, U64, U64) { return std::min(u16(a), u16(b)); });
  check_integer("abs.s32 %r0, %r1;", 'r',
                [](U64 a, U64, U64, U64) { return low(std::abs(std::int64_t{s32(a)})); });
  check_integer("neg.s64 %q0, %q1;", 'q', [](U64 a, U64, U64, U64) { return 0 - a; });
  check_integer("add.cc.u32 %r0, %r1, %r2; addc.u32 %r0, %r3, 0;", 'r',
                [](U64 a, U64 b, U64 c, U64) { return u32(c + ((U64{u32(a)} + u32(b)) >> 32)); });
  check_integer("sub.cc.u64 %q0, %q1, %q2; subc.u64 %q0, %q3, 0;", 'q',
                [](U64 a, U64 b, U64 c, U64) { return c - (a < b); });
  check_integer("dp4a.u32.s32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    std::int64_t sum = s32(c);
    for (int i = 0; i < 4; ++i)
      sum += std::int64_t{static_cast<std::uint8_t>(a >> (8 * i))} *
             static_cast<std::int8_t>(b >> (8 * i));
    return low(sum);
  });
  check_integer("dp2a.lo.s32.s32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    return low(std::int64_t{s16(a)} * static_cast<std::int8_t>(b) +
               std::int64_t{s16(a >> 16)} * static_cast<std::int8_t>(b >> 8) + s32(c));
  });
}

TEST_CASE("Bits") {
  check_integer("and.b64 %q0, %q1, %q2;", 'q', [](U64 a, U64 b, U64, U64) { return a & b; });
  check_integer("or.b32 %r0, %r1, %r2;", 'r', [](U64 a, U64 b, U64, U64) { return u32(a | b); });
  check_integer("xor.b16 %h0, %h1, %h2;", 'h', [](U64 a, U64 b, U64, U64) { return u16(a ^ b); });
  check_integer("not.b32 %r0, %r1;", 'r', [](U64 a, U64, U64, U64) { return u32(~a); });
  check_integer("cnot.b32 %r0, %r1;", 'r', [](U64 a, U64, U64, U64) { return U64{u32(a) == 0}; });
  check_integer("and.pred %p0, %p1, %p2; not.pred %p0, %p0;", 'p',
                [](U64 a, U64 b, U64, U64) { return !(a & b & 1); });
  check_integer("xor.pred %p0, %p1, -1;", 'p', [](U64 a, U64, U64, U64) { return ~a & 1; });
  check_integer("mov.pred %p5, -1; xor.pred %p0, %p5, %p1;", 'p',
                [](U64 a, U64, U64, U64) { return ~a & 1; });
  check_integer("xor.pred %p0, %p1, %p2;", 'p', [](U64 a, U64 b, U64, U64) { return (a ^ b) & 1; });
  check_integer("shl.b32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return u32(b) > 31 ? 0 : u32(a << u32(b)); });
  check_integer("shl.b64 %q0, %q1, %r2;", 'q',
                [](U64 a, U64 b, U64, U64) { return u32(b) > 63 ? 0 : a << u32(b); });
  check_integer("shr.u32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return u32(b) > 31 ? 0 : u32(a) >> u32(b); });
  check_integer("shr.s64 %q0, %q1, %r2;", 'q', [](U64 a, U64 b, U64, U64) {
    return static_cast<U64>(s64(a) >> std::min(u32(b), 63U));
  });
  check_integer("shr.s16 %h0, %h1, %r2;", 'h', [](U64 a, U64 b, U64, U64) {
    return u16(static_cast<U64>(s16(a) >> std::min(u32(b), 15U)));
  });
  check_integer("shf.l.wrap.b32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    const unsigned n = c & 31;
    return n ? u32(b << n | U64{u32(a)} >> (32 - n)) : u32(b);
  });
  check_integer("shf.r.clamp.b32 %r0, %r1, %r2, %r3;", 'r', [](U64 a, U64 b, U64 c, U64) {
    const unsigned n = std::min(u32(c), 32U);
    return u32((U64{u32(a)} | b << 32) >> n);
  });
  check_integer("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", 'r',
                [](U64 a, U64 b, U64 c, U64) { return u32(a ^ b ^ c); });
  check_integer("lop3.b32 %r0, %r1, %r2, %r3, 0xe2;", 'r',
                [](U64 a, U64 b, U64 c, U64) { return u32((a & b) | (~b & c)); });
  check_integer("popc.b64 %r0, %q1;", 'r',
                [](U64 a, U64, U64, U64) { return static_cast<U64>(std::popcount(a)); });
  check_integer("clz.b32 %r0, %r1;", 'r',
                [](U64 a, U64, U64, U64) { return static_cast<U64>(std::countl_zero(u32(a))); });
  check_integer("bfind.u32 %r0, %r1;", 'r', [](U64 a, U64, U64, U64) {
    return u32(a) ? 31U - static_cast<unsigned>(std::countl_zero(u32(a))) : 0xffffffffU;
  });
  check_integer("bfind.shiftamt.s32 %r0, %r1;", 'r', [](U64 a, U64, U64, U64) {
    const std::uint32_t v = s32(a) < 0 ? ~u32(a) : u32(a);
    return v ? static_cast<U64>(std::countl_zero(v)) : 0xffffffffU;
  });
  check_integer("brev.b32 %r0, %r1;", 'r', [](U64 a, U64, U64, U64) {
    U64 r = 0;
    for (int i = 0; i < 32; ++i) r = r << 1 | ((a >> i) & 1);
    return r;
  });
  check_integer("and.b32 %r3, %r3, 31; and.b32 %r4, %r4, 31; bfe.u32 %r0, %r1, %r3, %r4;", 'r',
                [](U64 a, U64, U64 c, U64 d) {
                  return U64{u32(a)} >> (c & 31) & ((U64{1} << (d & 31)) - 1);
                });
  check_integer("bfe.s32 %r0, %r1, 5, 9;", 'r',
                [](U64 a, U64, U64, U64) { return low(s32(u32(a) << 18) >> 23); });
  check_integer("bfi.b32 %r0, %r1, %r2, 7, 12;", 'r', [](U64 a, U64 b, U64, U64) {
    return u32((b & ~(U64{0xfff} << 7)) | (a & 0xfff) << 7);
  });
  check_integer("and.b32 %r3, %r3, 15; and.b32 %r4, %r4, 15; bmsk.clamp.b32 %r0, %r3, %r4;", 'r',
                [](U64, U64, U64 c, U64 d) { return ((U64{1} << (d & 15)) - 1) << (c & 15); });
  check_integer("prmt.b32 %r0, %r1, %r2, 0x7c10;", 'r', [](U64 a, U64 b, U64, U64) {
    const U64 both = u32(a) | b << 32;
    const U64 sign = (both >> 39) & 1 ? 0xff : 0;
    return (both & 0xffff) | sign << 16 | (both >> 56) << 24;
  });
  check_integer("prmt.b32.rc8 %r0, %r1, %r2, 2;", 'r',
                [](U64 a, U64, U64, U64) { return ((a >> 16) & 255) * 0x01010101; });
}

TEST_CASE("Comparisons, selections, moves") {
  check_integer("setp.lt.s32 %p0, %r1, %r2;", 'p',
                [](U64 a, U64 b, U64, U64) { return s32(a) < s32(b); });
  check_integer("setp.lo.u32 %p0, %r1, %r2;", 'p',
                [](U64 a, U64 b, U64, U64) { return u32(a) < u32(b); });
  check_integer("setp.hs.u64 %p0, %q1, %q2;", 'p', [](U64 a, U64 b, U64, U64) { return a >= b; });
  check_integer("setp.ge.s64 %p0, %q1, %q2;", 'p',
                [](U64 a, U64 b, U64, U64) { return s64(a) >= s64(b); });
  check_integer("setp.eq.b16 %p0, %h1, %h2;", 'p',
                [](U64 a, U64 b, U64, U64) { return u16(a) == u16(b); });
  check_integer("setp.ne.and.u32 %p0, %r1, %r2, %p3;", 'p',
                [](U64 a, U64 b, U64 c, U64) { return u32(a) != u32(b) && (c & 1); });
  check_integer("setp.gt.or.s32 %p0|%p5, %r1, %r2, !%p3; mov.pred %p0, %p5;", 'p',
                [](U64 a, U64 b, U64 c, U64) { return s32(a) <= s32(b) || !(c & 1); });
  check_integer("set.lt.u32.s32 %r0, %r1, %r2;", 'r',
                [](U64 a, U64 b, U64, U64) { return s32(a) < s32(b) ? 0xffffffffU : 0; });
  check_integer("selp.b64 %q0, %q1, %q2, %p3;", 'q',
                [](U64 a, U64 b, U64 c, U64) { return c & 1 ? a : b; });
  check_integer("slct.u32.s32 %r0, %r1, %r2, %r3;", 'r',
                [](U64 a, U64 b, U64 c, U64) { return s32(c) >= 0 ? u32(a) : u32(b); });
  check_integer("mov.b64 {%r0, %r5}, %q1; mov.b64 %q0, {%r5, %r0};", 'q',
                [](U64 a, U64, U64, U64) { return a >> 32 | a << 32; });
  check_integer("mov.b32 {%h0, %h5}, %r1; mov.b32 %r0, {%h5, %h0};", 'r',
                [](U64 a, U64, U64, U64) { return u32(u16(a >> 16) | U64{u16(a)} << 16); });
  check_integer("mov.u32 %r0, 7; @%p1 mov.u32 %r0, 8; @!%p2 add.s32 %r0, %r0, 16;", 'r',
                [](U64 a, U64 b, U64, U64) { return (a & 1 ? 8U : 7U) + (b & 1 ? 0U : 16U); });
  check_integer("mov.u32 %r0, -3;", 'r', [](U64, U64, U64, U64) { return 0xfffffffdU; });
  check("setp.lt.f32 %p0, %f1, %f2;", 'p', floats(),
        [](U64 a, U64 b, U64, U64) { return as_float(a) < as_float(b); });
  check("setp.geu.f32 %p0, %f1, %f2;", 'p', floats(),
        [](U64 a, U64 b, U64, U64) { return !(as_float(a) < as_float(b)); });
  check("setp.ne.f32 %p0, %f1, %f2;", 'p', floats(), [](U64 a, U64 b, U64, U64) {
    return as_float(a) < as_float(b) || as_float(a) > as_float(b);
  });
  check("setp.nan.f32 %p0, %f1, %f2;", 'p', floats(),
        [](U64 a, U64 b, U64, U64) { return std::isnan(as_float(a)) || std::isnan(as_float(b)); });
  check("testp.subnormal.f32 %p0, %f1;", 'p', floats(),
        [](U64 a, U64, U64, U64) { return std::fpclassify(as_float(a)) == FP_SUBNORMAL; });
}

TEST_CASE("Floats: correctly rounded") {
  check_float("add.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a + b; });
  check_float("sub.rn.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a - b; });
  check_float("mul.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a * b; });
  check_float("fma.rn.f32 %f0, %f1, %f2, %f3;",
              [](float a, float b, float c) { return std::fma(a, b, c); });
  check_float("div.rn.f32 %f0, %f1, %f2;", [](float a, float b, float) { return a / b; });
  check_float("rcp.rn.f32 %f0, %f1;", [](float a, float, float) { return 1 / a; });
  check_float("sqrt.rn.f32 %f0, %f1;", [](float a, float, float) { return std::sqrt(a); });
  check_float("add.sat.f32 %f0, %f1, %f2;", [](float a, float b, float) {
    return std::isnan(a + b) ? 0 : std::clamp(a + b, 0.0F, 1.0F);
  });
  const auto flush = [](float v) {
    return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0F, v) : v;
  };
  check_float("mul.ftz.f32 %f0, %f1, %f2;",
              [&](float a, float b, float) { return flush(flush(a) * flush(b)); });
  check_float("min.f32 %f0, %f1, %f2;", [](float a, float b, float) {
    // Of a number and a NaN the number; fmin of the C library has another view of signalling NaNs.
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
  });
  check_float("max.NaN.f32 %f0, %f1, %f2;", [](float a, float b, float) {
    if (std::isnan(a) || std::isnan(b)) return std::nanf("");
    return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b);
  });
  check("abs.f32 %f0, %f1;", 'f', floats(), [](U64 a, U64, U64, U64) { return a & 0x7fffffff; });
  check("neg.f32 %f0, %f1;", 'f', floats(), [](U64 a, U64, U64, U64) { return a ^ 0x80000000; });
  check("copysign.f32 %f0, %f1, %f2;", 'f', doubles(),
        [](U64 a, U64 b, U64, U64) { return u32((a & 0x80000000) | (b & 0x7fffffff)); });
  check_double("add.f64 %d0, %d1, %d2;", [](double a, double b, double) { return a + b; });
  check_double("mul.f64 %d0, %d1, %d2;", [](double a, double b, double) { return a * b; });
  check_double("fma.rn.f64 %d0, %d1, %d2, %d3;",
               [](double a, double b, double c) { return std::fma(a, b, c); });
  check_double("div.rn.f64 %d0, %d1, %d2;", [](double a, double b, double) { return a / b; });
  check_double("max.f64 %d0, %d1, %d2;",
               [](double a, double b, double) { return std::fmax(a, b); });
}

TEST_CASE("Floats: directed rounding brackets the exact result") {
  const auto all = floats();
  const auto down = run("add.rm.f32 %f0, %f1, %f2;", 'f', all);
  const auto up = run("add.rp.f32 %f0, %f1, %f2;", 'f', all);
  const auto zero = run("add.rz.f32 %f0, %f1, %f2;", 'f', all);
  const auto product_down = run("mul.rm.f32 %f0, %f1, %f2;", 'f', all);
  int inexact = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double a = static_cast<double>(as_float(all[i][0])),
                 b = static_cast<double>(as_float(all[i][1]));
    const double exact = a + b;  // exact but for huge differences of exponents
    if (!std::isfinite(exact) || std::fabs(exact) > 3e38 ||
        std::fabs(std::ilogb(a) - std::ilogb(b)) > 28)
      continue;
    const double d = static_cast<double>(as_float(down[i])),
                 u = static_cast<double>(as_float(up[i]));
    REQUIRE(d <= exact);
    REQUIRE(u >= exact);
    REQUIRE(as_float(up[i]) <= std::nextafter(as_float(down[i]), INFINITY));
    REQUIRE(static_cast<double>(as_float(zero[i])) == (exact < 0 ? u : d));
    inexact += d != u;
    if (std::fabs(a * b) < 1e38) REQUIRE(static_cast<double>(as_float(product_down[i])) <= a * b);
  }
  CHECK(inexact > 100);
}

TEST_CASE("Approximate instructions are the rounded result, or off by as much as asked for") {
  const auto near = [](const char* instruction, double (*reference)(double), double from,
                       double to) {
    std::mt19937_64 random(5);
    std::uniform_real_distribution<double> in(from, to);
    std::vector<Operands> operands;
    for (int i = 0; i < 256; ++i)
      operands.push_back({from_float(static_cast<float>(in(random))), 0, 0, 0});
    MachineOptions perturbed;
    perturbed.approximate_ulps = 2;
    const auto exact = run(instruction, 'f', operands);
    const auto moved = run(instruction, 'f', operands, perturbed);
    int different = 0;
    for (std::size_t i = 0; i < operands.size(); ++i) {
      const auto expected =
          static_cast<float>(reference(static_cast<double>(as_float(operands[i][0]))));
      INFO(instruction << ' ' << as_float(operands[i][0]));
      REQUIRE(as_float(exact[i]) == expected);
      const auto distance =
          std::abs(static_cast<std::int64_t>(exact[i]) - static_cast<std::int64_t>(moved[i]));
      REQUIRE(distance <= 2);
      different += distance > 0;
    }
    CHECK(different > 100);
  };
  near(
      "ex2.approx.f32 %f0, %f1;", [](double v) { return std::exp2(v); }, -20, 20);
  near(
      "lg2.approx.f32 %f0, %f1;", [](double v) { return std::log2(v); }, 2, 1e6);
  near(
      "rcp.approx.f32 %f0, %f1;", [](double v) { return 1 / v; }, 0.1, 1e3);
  near(
      "sqrt.approx.f32 %f0, %f1;", [](double v) { return std::sqrt(v); }, 0.1, 1e3);
  near(
      "rsqrt.approx.f32 %f0, %f1;", [](double v) { return 1 / std::sqrt(v); }, 0.1, 1e3);
  near(
      "sin.approx.f32 %f0, %f1;", [](double v) { return std::sin(v); }, 0.1, 3);
  near(
      "cos.approx.f32 %f0, %f1;", [](double v) { return std::cos(v); }, 0.1, 1.5);
  near(
      "tanh.approx.f32 %f0, %f1;", [](double v) { return std::tanh(v); }, 0.1, 3);
}

TEST_CASE("Conversions") {
  check_integer("cvt.s64.s32 %q0, %r1;", 'q',
                [](U64 a, U64, U64, U64) { return static_cast<U64>(std::int64_t{s32(a)}); });
  check_integer("cvt.s32.s8 %r0, %r1;", 'r',
                [](U64 a, U64, U64, U64) { return low(static_cast<std::int8_t>(a)); });
  check_integer("cvt.u16.u64 %h0, %q1;", 'h', [](U64 a, U64, U64, U64) { return u16(a); });
  check_integer("cvt.sat.u8.s32 %r0, %r1;", 'r',
                [](U64 a, U64, U64, U64) { return U64(std::clamp(s32(a), 0, 255)); });
  check_integer("cvt.rn.f32.u64 %f0, %q1;", 'f',
                [](U64 a, U64, U64, U64) { return from_float(static_cast<float>(a)); });
  check_integer("cvt.rn.f32.s32 %f0, %r1;", 'f',
                [](U64 a, U64, U64, U64) { return from_float(static_cast<float>(s32(a))); });
  check_integer("cvt.rn.f64.s64 %d0, %q1;", 'd',
                [](U64 a, U64, U64, U64) { return from_double(static_cast<double>(s64(a))); });
  const auto saturate = [](double v, double lowest, double highest) {
    return std::isnan(v) ? 0 : v < lowest ? lowest : v > highest ? highest : v;
  };
  check("cvt.rzi.s32.f32 %r0, %f1;", 'r', floats(), [&](U64 a, U64, U64, U64) {
    return low(static_cast<std::int64_t>(
        saturate(std::trunc(static_cast<double>(as_float(a))), -2147483648.0, 2147483647.0)));
  });
  check("cvt.rni.u32.f32 %r0, %f1;", 'r', floats(), [&](U64 a, U64, U64, U64) {
    return low(static_cast<std::int64_t>(
        saturate(std::nearbyint(static_cast<double>(as_float(a))), 0, 4294967295.0)));
  });
  check("cvt.rmi.s64.f32 %q0, %f1; cvt.u32.u64 %r0, %q0;", 'r',
        {{from_float(-2.5F), 0, 0, 0}, {from_float(7.9F), 0, 0, 0}}, [](U64 a, U64, U64, U64) {
          return low(static_cast<std::int64_t>(std::floor(as_float(a))));
        });
  check_float("cvt.rpi.f32.f32 %f0, %f1;", [](float a, float, float) { return std::ceil(a); });
  check_float("cvt.sat.f32.f32 %f0, %f1;",
              [](float a, float, float) { return std::isnan(a) ? 0 : std::clamp(a, 0.0F, 1.0F); });
  check("cvt.rn.f32.f64 %f0, %d1;", 'f', doubles(),
        [](U64 a, U64, U64, U64) { return from_float(static_cast<float>(as_double(a))); });
  // bf16 by the rule of adding half a unit, written another way than in the machine.
  const auto bf16 = [](U64 bits) -> U64 {
    const std::uint32_t word = u32(bits);
    if (std::isnan(as_float(bits))) return 0x7fff;
    return u16((U64{word} + 0x7fff + ((word >> 16) & 1)) >> 16);
  };
  check("cvt.rn.bf16.f32 %h0, %f1;", 'h', floats(), [&](U64 a, U64, U64, U64) { return bf16(a); });
  check("cvt.rz.bf16.f32 %h0, %f1;", 'h', floats(),
        [&](U64 a, U64, U64, U64) { return std::isnan(as_float(a)) ? 0x7fff : u16(a >> 16); });
  check("cvt.rn.bf16x2.f32 %r0, %f1, %f2;", 'r', floats(),
        [&](U64 a, U64 b, U64, U64) { return bf16(a) << 16 | bf16(b); });
  check("cvt.f32.bf16 %f0, %h1;", 'f', integers(), [](U64 a, U64, U64, U64) {
    const U64 bits = U64{u16(a)} << 16;
    return std::isnan(as_float(bits)) ? U64{0x7fffffff} : bits;
  });
}

TEST_CASE("Half precision: every value, and rounding to the nearest by search") {
  // The value of a half by its definition.
  const auto value = [](unsigned bits) {
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const double fraction = bits & 1023;
    const double magnitude =
        exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return bits & 0x8000 ? -magnitude : magnitude;
  };
  std::vector<Operands> all;
  for (unsigned bits = 0; bits < 0x10000; bits += 3) {
    if ((bits & 0x7c00) != 0x7c00) all.push_back({bits, 0, 0, 0});
  }
  check("cvt.f32.f16 %f0, %h1;", 'f', all,
        [&](U64 a, U64, U64, U64) { return from_float(static_cast<float>(value(u32(a)))); });
  check("cvt.f32.f16 %f0, %h1; cvt.rn.f16.f32 %h0, %f0;", 'h', all,
        [](U64 a, U64, U64, U64) { return a; });
  const auto nearest = [&](double v) -> unsigned {
    const unsigned sign = std::signbit(v) ? 0x8000 : 0;
    const double m = std::fabs(v);
    unsigned below = 0, above = 0x7c00;  // by bisection; infinity stands for 65536
    while (above - below > 1) {
      const unsigned middle = (below + above) / 2;
      if (value(middle) <= m)
        below = middle;
      else
        above = middle;
    }
    const double down = m - value(below), up = (above == 0x7c00 ? 65536.0 : value(above)) - m;
    return sign | (m >= 65536 || up < down || (up == down && below % 2) ? above : below);
  };
  check("cvt.rn.f16.f32 %h0, %f1;", 'h', floats(), [&](U64 a, U64, U64, U64) -> U64 {
    const double v = static_cast<double>(as_float(a));
    return std::isnan(v) ? 0x7fff : nearest(v);
  });
  std::vector<Operands> triples;
  std::mt19937 random(8);
  while (triples.size() < 600) {
    const auto half = [&] {
      return U64{(random() & 0x8000) | ((random() % 20 + 4) << 10) | (random() & 1023)};
    };
    triples.push_back({half() | half() << 16, half() | half() << 16, half() | half() << 16, 0});
  }
  check("add.f16 %h0, %h1, %h2;", 'h', triples,
        [&](U64 a, U64 b, U64, U64) { return nearest(value(u16(a)) + value(u16(b))); });
  check("mul.f16x2 %r0, %r1, %r2;", 'r', triples, [&](U64 a, U64 b, U64, U64) {
    return U64{nearest(value(u16(a)) * value(u16(b)))} |
           U64{nearest(value(u16(a >> 16)) * value(u16(b >> 16)))} << 16;
  });
  check("fma.rn.f16 %h0, %h1, %h2, %h3;", 'h', triples, [&](U64 a, U64 b, U64 c, U64) {
    // 22 + 40 bits: exact in the 64 bits of a long double.
    const long double exact =
        static_cast<long double>(value(u16(a))) * value(u16(b)) + value(u16(c));
    double odd = static_cast<double>(exact);
    if (static_cast<long double>(odd) != exact && !(std::bit_cast<U64>(odd) & 1))
      odd = std::nextafter(odd, exact > static_cast<long double>(odd) ? INFINITY : -INFINITY);
    return nearest(odd);
  });
  check("cvt.rn.f16x2.f32 %r0, %f1, %f2;", 'r', floats(), [&](U64 a, U64 b, U64, U64) {
    const auto half = [&](U64 bits) {
      return std::isnan(as_float(bits)) ? 0x7fffU : nearest(static_cast<double>(as_float(bits)));
    };
    return U64{half(a)} << 16 | half(b);
  });
  check("neg.f16x2 %r0, %r1;", 'r', triples,
        [](U64 a, U64, U64, U64) { return u32(a ^ 0x80008000); });
  check("max.f16 %h0, %h1, %h2;", 'h', triples,
        [&](U64 a, U64 b, U64, U64) { return value(u16(a)) > value(u16(b)) ? u16(a) : u16(b); });
  check("setp.lt.f16 %p0, %h1, %h2;", 'p', triples,
        [&](U64 a, U64 b, U64, U64) { return value(u16(a)) < value(u16(b)); });
  check("fma.rn.bf16x2 %r0, %r1, %r2, %r3;", 'r', {{0x3f803fc0, 0x40004000, 0x3f003f00, 0}},
        [](U64, U64, U64, U64) { return 0x40204060U; });
}

TEST_CASE("Matrix products of integers and halves") {
  // A 16 x 16 product of bytes and one of bfloat16, the elements numbered by the definition.
  const std::string ptx = module_of(
      ".entry bytes(.param .u64 a, .param .u64 b, .param .u64 d) {\n"
      ".reg .b64 %q<8>; .reg .b32 %r<20>;\n"
      "ld.param.u64 %q1, [a]; ld.param.u64 %q2, [b]; ld.param.u64 %q3, [d]; mov.u32 %r1, %tid.x;\n"
      "mul.wide.u32 %q4, %r1, 8; add.s64 %q1, %q1, %q4; mul.wide.u32 %q5, %r1, 4; add.s64 %q2, "
      "%q2, %q5;\n"
      "ld.global.v2.u32 {%r2, %r3}, [%q1]; ld.global.u32 %r4, [%q2];\n"
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.u8.s32 {%r10, %r11, %r12, %r13}, {%r2, %r3}, "
      "{%r4}, {5, 5, 5, 5};\n"
      "mul.wide.u32 %q4, %r1, 16; add.s64 %q3, %q3, %q4; st.global.v4.u32 [%q3], {%r10, %r11, "
      "%r12, %r13}; ret; }\n"
      ".entry halves(.param .u64 a, .param .u64 b, .param .u64 d) {\n"
      ".reg .b64 %q<8>; .reg .b32 %r<20>; .reg .f32 %f<8>;\n"
      "ld.param.u64 %q1, [a]; ld.param.u64 %q2, [b]; ld.param.u64 %q3, [d]; mov.u32 %r1, %tid.x;\n"
      "mul.wide.u32 %q4, %r1, 16; add.s64 %q1, %q1, %q4; mul.wide.u32 %q5, %r1, 8; add.s64 %q2, "
      "%q2, %q5;\n"
      "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%q1]; ld.global.v2.u32 {%r6, %r7}, [%q2]; mov.f32 "
      "%f1, 0f3F800000;\n"
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r2, %r3, %r4, "
      "%r5}, {%r6, %r7}, {%f1, %f1, %f1, %f1};\n"
      "add.s64 %q3, %q3, %q4; st.global.v4.f32 [%q3], {%f2, %f3, %f4, %f5}; ret; }\n");
  Device device;
  const auto module = device.load(ptx);
  std::mt19937 random(4);
  LaunchShape warp;
  warp.block.x = 32;
  {
    int a[16][16], b[16][8];
    for (auto& row : a)
      for (int& v : row) v = static_cast<int>(random() % 256) - 128;
    for (auto& row : b)
      for (int& v : row) v = static_cast<int>(random() % 256);
    std::vector<std::int8_t> packed_a(256);
    std::vector<std::uint8_t> packed_b(128);
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t i = 0; i < 8; ++i)
        packed_a[lane * 8 + i] =
            static_cast<std::int8_t>(a[lane / 4 + (i >= 4 ? 8 : 0)][lane % 4 * 4 + i % 4]);
      for (std::size_t i = 0; i < 4; ++i)
        packed_b[lane * 4 + i] = static_cast<std::uint8_t>(b[lane % 4 * 4 + i][lane / 4]);
    }
    const Address d = allocate<int>(device, 128);
    CHECK(device.launch_with(module->find("bytes"), warp, kLegacyStream, upload(device, packed_a),
                             upload(device, packed_b), d) == Status::success);
    const auto found = download<int>(device, d, 128);
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t i = 0; i < 4; ++i) {
        int expected = 5;
        for (std::size_t k = 0; k < 16; ++k)
          expected += a[lane / 4 + (i >= 2 ? 8 : 0)][k] * b[k][lane % 4 * 2 + i % 2];
        REQUIRE(found[lane * 4 + i] == expected);
      }
    }
  }
  {
    float a[16][16], b[16][8];
    for (auto& row : a)
      for (float& v : row) v = static_cast<float>(random() % 17) - 8;
    for (auto& row : b)
      for (float& v : row) v = static_cast<float>(random() % 9) / 4;
    std::vector<std::uint16_t> packed_a(256), packed_b(128);
    const auto bf16 = [](float v) { return static_cast<std::uint16_t>(from_float(v) >> 16); };
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t i = 0; i < 8; ++i) {
        const std::size_t r = i / 2;
        packed_a[lane * 8 + i] =
            bf16(a[lane / 4 + (r % 2 ? 8 : 0)][lane % 4 * 2 + i % 2 + (r >= 2 ? 8 : 0)]);
      }
      for (std::size_t i = 0; i < 4; ++i)
        packed_b[lane * 4 + i] = bf16(b[lane % 4 * 2 + i % 2 + (i >= 2 ? 8 : 0)][lane / 4]);
    }
    const Address d = allocate<float>(device, 128);
    CHECK(device.launch_with(module->find("halves"), warp, kLegacyStream, upload(device, packed_a),
                             upload(device, packed_b), d) == Status::success);
    const auto found = download<float>(device, d, 128);
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t i = 0; i < 4; ++i) {
        float expected = 1;
        for (std::size_t k = 0; k < 16; ++k)
          expected += a[lane / 4 + (i >= 2 ? 8 : 0)][k] * b[k][lane % 4 * 2 + i % 2];
        REQUIRE(found[lane * 4 + i] == expected);
      }
    }
  }
  INFO(first_fault(device));
  CHECK(device.faults().empty());
}

TEST_CASE("Matrices of halves loaded by a warp together") {
  for (const bool transposed : {false, true}) {
    Device device;
    // Element e of the 32 rows of 8 is e; lane l gives the address of row l.
    const auto kernel =
        device
            .load(module_of(
                ".entry k(.param .u64 out) { .reg .b64 %q<4>; .reg .b32 %r<12>; .shared .align 16 "
                ".b8 tile[512];\n"
                "ld.param.u64 %q1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, tile; shl.b32 %r3, "
                "%r1, 4; add.u32 %r2, %r2, %r3;\n"
                "shl.b32 %r4, %r1, 3; mad.lo.u32 %r4, %r4, 0x10001, 0x10000;\n"
                "add.u32 %r5, %r4, 0x20002; add.u32 %r6, %r5, 0x20002; add.u32 %r7, %r6, 0x20002;\n"
                "st.shared.v4.u32 [%r2], {%r4, %r5, %r6, %r7}; bar.warp.sync -1;\n"
                "ldmatrix.sync.aligned.m8n8.x4" +
                std::string(transposed ? ".trans" : "") +
                ".shared.b16 {%r4, %r5, %r6, %r7}, [%r2];\n"
                "mul.wide.u32 %q2, %r1, 16; add.s64 %q1, %q1, %q2; st.global.v4.u32 [%q1], {%r4, "
                "%r5, %r6, %r7}; ret; }"))
            ->find("k");
    const Address out = allocate<std::uint16_t>(device, 256);
    device.launch_with(kernel, {{}, {32, 1, 1}, 0}, kLegacyStream, out);
    const auto found = download<std::uint16_t>(device, out, 256);
    INFO(first_fault(device));
    REQUIRE(device.faults().empty());
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t i = 0; i < 8; ++i) {
        const std::size_t matrix = i / 2, along = lane % 4 * 2 + i % 2, across = lane / 4;
        const std::size_t row = transposed ? along : across, column = transposed ? across : along;
        REQUIRE(found[lane * 8 + i] == matrix * 64 + row * 8 + column);
      }
    }
  }
}

TEST_CASE("Operations of a warp together") {
  const std::string head =
      ".reg .pred %p<6>; .reg .b32 %r<12>; .reg .b64 %q<6>;\n"
      "ld.param.u64 %q1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %q2, %r1, 4; add.s64 %q1, %q1, "
      "%q2;\n"
      "mul.lo.u32 %r2, %r1, 10; and.b32 %r3, %r1, 7; setp.lt.u32 %p1, %r1, 12; mov.u32 %r0, 0;\n";
  const auto warp = [&](const std::string& code,
                        const std::function<std::uint32_t(unsigned)>& reference) {
    Device device;
    const auto kernel = device
                            .load(module_of(".entry k(.param .u64 out) {\n" + head + code +
                                            "\nst.global.u32 [%q1], %r0; ret; }"))
                            ->find("k");
    LaunchShape shape;
    shape.block.x = 32;
    const Address out = allocate<std::uint32_t>(device, 32);
    device.launch_with(kernel, shape, kLegacyStream, out);
    const auto found = download<std::uint32_t>(device, out, 32);
    INFO(code << ' ' << first_fault(device));
    REQUIRE(device.faults().empty());
    for (unsigned lane = 0; lane < 32; ++lane) REQUIRE(found[lane] == reference(lane));
  };
  warp("shfl.sync.bfly.b32 %r0, %r2, 5, 31, -1;", [](unsigned l) { return (l ^ 5) * 10; });
  warp("shfl.sync.idx.b32 %r0, %r2, 3, 0x181f, -1;",
       [](unsigned l) { return (l / 8 * 8 + 3) * 10; });
  warp("shfl.sync.up.b32 %r0|%p2, %r2, 3, 0, -1; @!%p2 mov.u32 %r0, 7;",
       [](unsigned l) { return l < 3 ? 7 : (l - 3) * 10; });
  warp("shfl.sync.down.b32 %r0, %r2, 4, 0x100f, -1;",
       [](unsigned l) { return l % 16 < 12 ? (l + 4) * 10 : l * 10; });
  warp("vote.sync.ballot.b32 %r0, %p1, -1;", [](unsigned) { return 0xfffU; });
  warp("vote.sync.any.pred %p2, !%p1, -1; selp.u32 %r0, 1, 2, %p2;", [](unsigned) { return 1U; });
  warp("vote.sync.all.pred %p2, %p1, -1; selp.u32 %r0, 1, 2, %p2;", [](unsigned) { return 2U; });
  warp("match.any.sync.b32 %r0, %r3, -1;", [](unsigned l) { return 0x01010101U << (l % 8); });
  warp("match.all.sync.b32 %r0|%p2, %r3, -1; @%p2 mov.u32 %r0, 9;", [](unsigned) { return 0U; });
  warp("redux.sync.add.u32 %r0, %r1, -1;", [](unsigned) { return 496U; });
  warp("redux.sync.max.s32 %r0, %r2, -1;", [](unsigned) { return 310U; });
  warp("redux.sync.or.b32 %r0, %r3, -1;", [](unsigned) { return 7U; });
  warp("activemask.b32 %r0;", [](unsigned l) { return 1U << l; });
  warp("elect.sync %r4|%p2, -1; @%p2 mov.u32 %r0, 3;", [](unsigned l) { return l == 0 ? 3U : 0U; });
  warp("mov.u32 %r0, %lanemask_lt;", [](unsigned l) { return (1U << l) - 1; });
  // Half of the warp goes one way; its mask names only itself.
  warp("@!%p1 bra $L2; redux.sync.add.u32 %r0, %r1, 0xfff; $L2:",
       [](unsigned l) { return l < 12 ? 66U : 0U; });
}

TEST_CASE("Atomic operations") {
  struct Row {
    std::string operation;
    std::uint32_t start;
    std::uint32_t expected;
  };
  const std::vector<Row> rows = {
      {"add.u32 %r2, [%q1], %r1", 5, 5 + 2016}, {"min.s32 %r2, [%q1], %r1", 50, 0},
      {"max.u32 %r2, [%q1], %r1", 50, 63},      {"or.b32 %r2, [%q1], %r1", 64, 127},
      {"xor.b32 %r2, [%q1], %r1", 1, 1},        {"and.b32 %r2, [%q1], %r1", 0xff, 0},
      {"inc.u32 %r2, [%q1], 9", 0, 4},          {"dec.u32 %r2, [%q1], 9", 0, 6},
      {"cas.b32 %r2, [%q1], 7, 8", 7, 8}};
  for (const Row& row : rows) {
    Device device;
    const auto kernel =
        device
            .load(module_of(".entry k(.param .u64 out) { .reg .b32 %r<4>; .reg .b64 %q<3>; "
                            "ld.param.u64 %q1, [out]; mov.u32 %r1, %tid.x;\n"
                            "atom.global." +
                            row.operation + "; ret; }"))
            ->find("k");
    LaunchShape shape;
    shape.block.x = 64;
    const Address at = upload(device, std::vector<std::uint32_t>{row.start});
    device.launch_with(kernel, shape, kLegacyStream, at);
    INFO(row.operation << ' ' << first_fault(device));
    CHECK(download<std::uint32_t>(device, at, 1)[0] == row.expected);
    CHECK(device.faults().empty());
    REQUIRE(device.launches().size() == 1);
    CHECK(device.launches()[0].counters.of(InstructionClass::atomic) == 64);
  }
}

TEST_CASE("Atomic operations on floats, 64 bits, and generic addresses") {
  const auto atomic = [](const std::string& operation, std::vector<std::uint32_t> start) {
    Device device;
    const auto kernel =
        device
            .load(module_of(
                ".entry k(.param .u64 out) { .reg .f32 %f<3>; .reg .b32 %r<4>; .reg .b64 %q<4>;\n"
                "ld.param.u64 %q1, [out]; mov.u32 %r1, %tid.x; cvt.u64.u32 %q2, %r1;\n" +
                operation + "; ret; }"))
            ->find("k");
    LaunchShape shape;
    shape.block.x = 8;
    const std::size_t words = start.size();
    const Address at = upload(device, start);
    device.launch_with(kernel, shape, kLegacyStream, at);
    const auto found = download<std::uint32_t>(device, at, words);
    INFO(operation << ' ' << first_fault(device));
    CHECK(device.faults().empty());
    return found;
  };
  const auto bits = [](float v) { return static_cast<std::uint32_t>(from_float(v)); };
  CHECK(atomic("red.global.add.f32 [%q1], 0f3F000000", {bits(1)})[0] == bits(5));
  CHECK(atomic("atom.add.f32 %f1, [%q1], 0f3F000000", {bits(1)})[0] == bits(5));
  CHECK(atomic("red.global.add.noftz.f16x2 [%q1], %r1", {0x3c003c00})[0] ==
        0x3c003c00);  // subnormals vanish
  CHECK(atomic("red.global.add.u64 [%q1], %q2", {0xffffffff, 1}) ==
        std::vector<std::uint32_t>{27, 2});
  CHECK(atomic("atom.global.max.u64 %q3, [%q1], %q2", {3, 0}) == std::vector<std::uint32_t>{7, 0});
  CHECK(atomic("atom.global.exch.b32 %r2, [%q1], 9", {3})[0] == 9);
  CHECK(atomic("atom.global.cas.b64 %q3, [%q1], 5, 6", {5, 0})[0] == 6);
}

TEST_CASE("What is not supported is refused where it is reached, by name") {
  Device device;
  const auto kernel =
      device
          .load(module_of(".file 1 \"tree/kernel.cu\"\n"
                          ".entry k(.param .u32 go) { .reg .pred %p<2>; .reg .b32 %r<4>; "
                          "ld.param.u32 %r1, [go]; setp.eq.u32 %p1, %r1, 0;\n"
                          "@%p1 bra $end;\n.loc 1 42 0\nwgmma.fence.sync.aligned;\n$end: ret; }"))
          ->find("k");
  REQUIRE(kernel->unsupported() ==
          std::vector<std::string>{"wgmma.fence.sync.aligned at kernel.cu:42"});
  CHECK(device.launch_with(kernel, {}, kLegacyStream, std::uint32_t{0}) == Status::success);
  CHECK(device.synchronize() == Status::success);
  device.launch_with(kernel, {}, kLegacyStream, std::uint32_t{1});
  CHECK(device.synchronize() == Status::not_supported);
  const std::string text = first_fault(device);
  INFO(text);
  CHECK(contains(text, "unsupported instruction"));
  CHECK(contains(text, "wgmma.fence.sync.aligned"));
  CHECK(contains(text, "kernel k at kernel.cu:42"));
  CHECK(device.faults()[0].kind == FaultKind::unsupported);
  // The error stays, as on a GPU.
  CHECK(device.synchronize() == Status::not_supported);
}

TEST_CASE("Instructions of which only a form is supported are refused in the others") {
  for (const std::string instruction :
       {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%q1], %r1, [%q2]",
        "mapa.shared::cluster.u64 %q1, %q2, %r1", "cp.async.bulk.commit_group",
        "barrier.cluster.arrive",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%q1}, {%q1}, {%q1}, {%q1}",
        "cvt.rn.satfinite.e4m3x2.f32 %r1, %r1, %r1", "vote.ballot.b32 %r1, %p1",
        "add.unknown.s32 %r1, %r1, %r1", "call.uni f, (%r1)",
        "tex.1d.v4.f32.s32 {%r1, %r1, %r1, %r1}, [%q1, {%r1}]", "mbarrier.init.shared.b64 [%q1], 1",
        "fence.proxy.async", "max.s32 %r1, %r1, %r1, %r1", "ex2.approx.f64 %q1, %q1"}) {
    const Module module =
        parse_ptx(module_of(".entry k() { .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %q<4>; " +
                            instruction + "; ret; }"));
    INFO(instruction);
    CHECK(module.find("k")->unsupported().size() == 1);
  }
}

TEST_CASE("Text that is not PTX is refused with its line") {
  const auto error = [](const std::string& text) -> std::string {
    try {
      parse_ptx(text);
    } catch (const ParseError& e) {
      return e.what();
    }
    return "";
  };
  CHECK(contains(error(module_of("\nnonsense")), "PTX line 5"));
  CHECK(contains(error(module_of(".entry k() { .reg .b32 %r<2>; mov.u32 %r1, %unknown.x; }")),
                 "%unknown.x"));
  CHECK(contains(error(module_of(".entry k() { bra $nowhere; }")), "$nowhere"));
  CHECK(contains(error(module_of(".entry k() { .reg .b32 %r<2>; ")), "ends within"));
  CHECK(
      contains(error(module_of(".entry k() .reqnctapercluster 2 { ret; }")), ".reqnctapercluster"));
  CHECK_THROWS_AS(parse_ptx(module_of(".entry k1() { ret; } .entry k2() { ret; }")).find("k"),
                  ParseError);
}

TEST_CASE("registers that are not needed at once share a place, and values survive",
          "[registers]") {
  // Sums of i * i over i < n in a loop, kept from many values that live shortly; what a guard
  // leaves alone stays; a value from before the loop is needed after it.
  std::ostringstream body;
  body << "mov.u32 %r1, 0; mov.u32 %r2, 0; add.u32 %r3, %n, 1000; mov.u32 %r4, 77;\n"
          "setp.lt.u32 %p1, %n, 3; @%p1 mov.u32 %r4, 78;\n"
          "setp.eq.u32 %p1, %n, 0; @%p1 bra done;\n"
          "again:\n";
  for (int i = 10; i < 90; i += 2) {
    body << "mul.lo.u32 %r" << i << ", %r1, %r1; sub.u32 %r" << i + 1 << ", %r" << i << ", " << i
         << ";\n";
    if (i == 88) body << "add.u32 %r2, %r2, %r" << i << ";\n";
  }
  body << "add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, %n; @%p2 bra again;\n"
          "done:\n"
          "add.u32 %r5, %r2, %r3; add.u32 %r5, %r5, %r4;\n";
  Device device;
  const auto kernel =
      device
          .load(
              module_of(".entry sums(.param .u64 out) {\n"
                        ".reg .pred %p<4>; .reg .b32 %r<99>, %n; .reg .b64 %a<4>;\n"
                        "mov.u32 %n, %tid.x;\n" +
                        body.str() +
                        "ld.param.u64 %a1, [out]; mul.wide.u32 %a2, %n, 4; add.s64 %a1, %a1, %a2;\n"
                        "st.global.u32 [%a1], %r5; ret; }\n"))
          ->find("sums");
  CHECK(kernel->registers < 12);
  const Address out = allocate<std::uint32_t>(device, 40);
  LaunchShape shape;
  shape.block.x = 40;
  CHECK(device.launch_with(kernel, shape, kLegacyStream, out) == Status::success);
  const auto found = download<std::uint32_t>(device, out, 40);
  INFO(first_fault(device));
  REQUIRE(device.faults().empty());
  for (std::uint32_t n = 0; n < 40; ++n) {
    std::uint32_t expected = n + 1000 + (n < 3 ? 78 : 77);
    for (std::uint32_t i = 0; i < n; ++i) expected += i * i;
    CHECK(found[n] == expected);
  }
}
