// What the parser makes of PTX text and the machine runs: modules, kernels, instructions.
#ifndef VERKV_TESTS_CPU_DEVICE_PTX_HPP
#define VERKV_TESTS_CPU_DEVICE_PTX_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace verkv::cpu_device {

enum class Type : std::uint8_t {
  none,
  pred,
  b8,
  u8,
  s8,
  b16,
  u16,
  s16,
  f16,
  bf16,
  b32,
  u32,
  s32,
  f32,
  b64,
  u64,
  s64,
  f64,
  f16x2,
  bf16x2
};

enum class Space : std::uint8_t { generic, global, shared, local, param };

enum class Opcode : std::uint8_t {
  // An instruction that the machine does not know. It is refused when a thread reaches it.
  unsupported,
  // Moves and conversions.
  mov,
  cvt,
  cvta,
  selp,
  slct,
  prmt,
  isspacep,
  // Arithmetic of integers and floats.
  add,
  addc,
  sub,
  subc,
  mul,
  mad,
  mul24,
  mad24,
  sad,
  fma,
  div,
  rem,
  min,
  max,
  abs,
  neg,
  copysign,
  testp,
  // Bits.
  and_,
  or_,
  xor_,
  not_,
  cnot,
  shl,
  shr,
  shf,
  lop3,
  popc,
  clz,
  bfind,
  brev,
  bfe,
  bfi,
  bmsk,
  dp4a,
  dp2a,
  // Functions of the special unit.
  ex2,
  lg2,
  rcp,
  sqrt,
  rsqrt,
  sin,
  cos,
  tanh,
  // Comparisons.
  setp,
  set,
  // Memory.
  ld,
  st,
  atom,
  red,
  ldmatrix,
  cp_async,
  cp_async_commit,
  cp_async_wait,
  fence,
  no_effect,
  // Control.
  bra,
  exit,
  trap,
  // Cooperation.
  barrier_sync,
  barrier_arrive,
  barrier_reduce,
  warp_sync,
  shfl,
  vote,
  match,
  redux,
  activemask,
  elect,
  mma
};

// Classes that the counters of a launch distinguish.
enum class InstructionClass : std::uint8_t {
  move,
  integer,
  floating,
  special,
  conversion,
  memory,
  atomic,
  control,
  barrier,
  warp,
  tensor
};
inline constexpr std::size_t kInstructionClasses = 11;

enum class Compare : std::uint8_t {
  none,
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  lo,
  ls,
  hi,
  hs,
  equ,
  neu,
  ltu,
  leu,
  gtu,
  geu,
  num,
  nan
};

enum class Rounding : std::uint8_t { nearest, zero, down, up };

// Order of a memory access or a fence; volatile counts as relaxed.
enum class Order : std::uint8_t { weak, relaxed, acquire, release, acquire_release };

enum class AtomicOp : std::uint8_t { none, add, min, max, and_, or_, xor_, exch, cas, inc, dec };

enum class Special : std::uint8_t {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  nwarpid,
  lanemask_lt,
  lanemask_le,
  lanemask_gt,
  lanemask_ge,
  lanemask_eq,
  clock,
  smid,
  nsmid,
  dynamic_smem_size,
  total_smem_size
};

struct Operand {
  enum class Kind : std::uint8_t { none, reg, immediate, special, vector };
  Kind kind = Kind::none;
  bool negated = false;      // a predicate with "!"
  bool dynamic = false;      // an address relative to the start of dynamic shared memory
  std::int32_t reg = -1;     // register; the base of an address; for a vector its first element
  std::int32_t reg2 = -1;    // the register after "|"; for a vector the number of its elements
  std::int32_t symbol = -1;  // variable of the module whose address is added to the value
  std::uint64_t value = 0;   // immediate, offset of an address, or number of a special register
};

struct Instruction {
  Opcode opcode = Opcode::unsupported;
  Type type = Type::none;    // first type of the mnemonic: of the result
  Type type2 = Type::none;   // second type: of the source
  Type result = Type::none;  // what the destination holds: not always the first type
  Space space = Space::generic;
  Compare compare = Compare::none;
  AtomicOp atomic = AtomicOp::none;
  Rounding rounding = Rounding::nearest;
  Order order = Order::weak;
  InstructionClass kind = InstructionClass::move;
  std::uint8_t vector = 1;  // elements of a vector access
  std::uint8_t mode = 0;    // a variant; the parser's table says which
  std::uint8_t operand_count = 0;
  bool to_integer = false;  // rounds to an integer (rni, rzi, rmi, rpi)
  bool low = false, high = false, wide = false;
  bool flush = false, saturate = false, approximate = false, propagate_nan = false;
  bool carry_out = false, to_space = false, non_coherent = false, wide_scope = false;
  bool transposed = false, relu = false;
  bool guard_negated = false;
  std::int32_t guard = -1;
  std::int32_t target = -1;
  std::array<std::int16_t, 3> shape{};  // of a matrix instruction
  std::array<Type, 4> types{};          // of a matrix instruction: D, A, B, C
  std::array<Operand, 6> operands{};
};

// Where an instruction comes from. The file and line need nvcc's -lineinfo.
struct Location {
  std::int32_t file = -1, line = 0;                // of the source
  std::int32_t caller_file = -1, caller_line = 0;  // where it was inlined, if it was
  std::int32_t ptx_line = 0;
};

struct Parameter {
  std::string name;
  std::size_t offset = 0, size = 0;
};

struct Variable {  // of module scope
  std::string name;
  std::size_t size = 0, alignment = 1;
  std::vector<std::uint8_t> initial;
};

struct Kernel {
  std::string name, readable_name;
  std::vector<Parameter> parameters;
  std::size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  std::array<unsigned, 3> max_threads{}, required_threads{};  // zero: not stated
  std::int32_t registers = 0;
  int target = 0;  // of the module: 80 for sm_80
  std::vector<Instruction> code;
  std::vector<Operand> elements;       // of vector operands
  std::vector<Location> locations;     // beside code
  std::vector<std::string> mnemonics;  // beside code
  std::shared_ptr<const std::vector<std::string>> files;
  // "file:line", with where it was inlined; the PTX line where the source is not known.
  std::string where(std::size_t pc) const;
  // Mnemonic and place of each instruction that would be refused.
  std::vector<std::string> unsupported() const;
};

struct Module {
  std::map<std::string, std::shared_ptr<Kernel>> kernels;
  std::vector<Variable> variables;
  // The kernel whose mangled or readable name is this or, if only one does, contains it.
  std::shared_ptr<const Kernel> find(const std::string& name) const;
};

// Text that is not PTX, or declares what is not supported.
struct ParseError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr unsigned size_of(Type type) {
  switch (type) {
    case Type::pred:
    case Type::b8:
    case Type::u8:
    case Type::s8:
      return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
      return 8;
    default:
      return 4;
  }
}
constexpr bool is_float(Type type) {
  return type == Type::f16 || type == Type::bf16 || type == Type::f32 || type == Type::f64;
}
constexpr bool is_packed(Type type) { return type == Type::f16x2 || type == Type::bf16x2; }
constexpr bool is_signed(Type type) {
  return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}

}  // namespace verkv::cpu_device

#endif  // VERKV_TESTS_CPU_DEVICE_PTX_HPP
