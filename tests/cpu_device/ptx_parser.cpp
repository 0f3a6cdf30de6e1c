#include "ptx_parser.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <unordered_map>
#include <utility>

#include "registers.hpp"

namespace verkv::cpu_device {
namespace {

using Class = InstructionClass;

const std::unordered_map<std::string, Type> kTypes = {
    {"pred", Type::pred}, {"b8", Type::b8},       {"u8", Type::u8},        {"s8", Type::s8},
    {"b16", Type::b16},   {"u16", Type::u16},     {"s16", Type::s16},      {"f16", Type::f16},
    {"bf16", Type::bf16}, {"b32", Type::b32},     {"u32", Type::u32},      {"s32", Type::s32},
    {"f32", Type::f32},   {"b64", Type::b64},     {"u64", Type::u64},      {"s64", Type::s64},
    {"f64", Type::f64},   {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2}};

struct OpcodeEntry {
  Opcode opcode;
  Class kind;
};

// What stands before the first "." of a mnemonic. The class of arithmetic follows from its type.
const std::unordered_map<std::string, OpcodeEntry> kOpcodes = {
    {"mov", {Opcode::mov, Class::move}},
    {"cvt", {Opcode::cvt, Class::conversion}},
    {"cvta", {Opcode::cvta, Class::move}},
    {"selp", {Opcode::selp, Class::move}},
    {"slct", {Opcode::slct, Class::move}},
    {"prmt", {Opcode::prmt, Class::integer}},
    {"isspacep", {Opcode::isspacep, Class::integer}},
    {"add", {Opcode::add, Class::integer}},
    {"addc", {Opcode::addc, Class::integer}},
    {"sub", {Opcode::sub, Class::integer}},
    {"subc", {Opcode::subc, Class::integer}},
    {"mul", {Opcode::mul, Class::integer}},
    {"mad", {Opcode::mad, Class::integer}},
    {"mul24", {Opcode::mul24, Class::integer}},
    {"mad24", {Opcode::mad24, Class::integer}},
    {"sad", {Opcode::sad, Class::integer}},
    {"fma", {Opcode::fma, Class::floating}},
    {"div", {Opcode::div, Class::integer}},
    {"rem", {Opcode::rem, Class::integer}},
    {"min", {Opcode::min, Class::integer}},
    {"max", {Opcode::max, Class::integer}},
    {"abs", {Opcode::abs, Class::integer}},
    {"neg", {Opcode::neg, Class::integer}},
    {"copysign", {Opcode::copysign, Class::floating}},
    {"testp", {Opcode::testp, Class::floating}},
    {"and", {Opcode::and_, Class::integer}},
    {"or", {Opcode::or_, Class::integer}},
    {"xor", {Opcode::xor_, Class::integer}},
    {"not", {Opcode::not_, Class::integer}},
    {"cnot", {Opcode::cnot, Class::integer}},
    {"shl", {Opcode::shl, Class::integer}},
    {"shr", {Opcode::shr, Class::integer}},
    {"shf", {Opcode::shf, Class::integer}},
    {"lop3", {Opcode::lop3, Class::integer}},
    {"popc", {Opcode::popc, Class::integer}},
    {"clz", {Opcode::clz, Class::integer}},
    {"bfind", {Opcode::bfind, Class::integer}},
    {"brev", {Opcode::brev, Class::integer}},
    {"bfe", {Opcode::bfe, Class::integer}},
    {"bfi", {Opcode::bfi, Class::integer}},
    {"bmsk", {Opcode::bmsk, Class::integer}},
    {"dp4a", {Opcode::dp4a, Class::integer}},
    {"dp2a", {Opcode::dp2a, Class::integer}},
    {"ex2", {Opcode::ex2, Class::special}},
    {"lg2", {Opcode::lg2, Class::special}},
    {"rcp", {Opcode::rcp, Class::special}},
    {"sqrt", {Opcode::sqrt, Class::special}},
    {"rsqrt", {Opcode::rsqrt, Class::special}},
    {"sin", {Opcode::sin, Class::special}},
    {"cos", {Opcode::cos, Class::special}},
    {"tanh", {Opcode::tanh, Class::special}},
    {"setp", {Opcode::setp, Class::integer}},
    {"set", {Opcode::set, Class::integer}},
    {"ld", {Opcode::ld, Class::memory}},
    {"ldu", {Opcode::ld, Class::memory}},
    {"st", {Opcode::st, Class::memory}},
    {"atom", {Opcode::atom, Class::atomic}},
    {"red", {Opcode::red, Class::atomic}},
    {"ldmatrix", {Opcode::ldmatrix, Class::memory}},
    {"cp", {Opcode::cp_async, Class::memory}},
    {"membar", {Opcode::fence, Class::memory}},
    {"fence", {Opcode::fence, Class::memory}},
    {"prefetch", {Opcode::no_effect, Class::memory}},
    {"prefetchu", {Opcode::no_effect, Class::memory}},
    {"nanosleep", {Opcode::no_effect, Class::control}},
    {"pmevent", {Opcode::no_effect, Class::control}},
    {"griddepcontrol", {Opcode::no_effect, Class::control}},
    {"bra", {Opcode::bra, Class::control}},
    {"ret", {Opcode::exit, Class::control}},
    {"exit", {Opcode::exit, Class::control}},
    {"trap", {Opcode::trap, Class::control}},
    {"brkpt", {Opcode::trap, Class::control}},
    {"bar", {Opcode::barrier_sync, Class::barrier}},
    {"barrier", {Opcode::barrier_sync, Class::barrier}},
    {"shfl", {Opcode::shfl, Class::warp}},
    {"vote", {Opcode::vote, Class::warp}},
    {"match", {Opcode::match, Class::warp}},
    {"redux", {Opcode::redux, Class::warp}},
    {"activemask", {Opcode::activemask, Class::warp}},
    {"elect", {Opcode::elect, Class::warp}},
    {"mma", {Opcode::mma, Class::tensor}}};

const std::unordered_map<std::string, Compare> kCompares = {
    {"eq", Compare::eq},   {"ne", Compare::ne},   {"lt", Compare::lt},   {"le", Compare::le},
    {"gt", Compare::gt},   {"ge", Compare::ge},   {"lo", Compare::lo},   {"ls", Compare::ls},
    {"hi", Compare::hi},   {"hs", Compare::hs},   {"equ", Compare::equ}, {"neu", Compare::neu},
    {"ltu", Compare::ltu}, {"leu", Compare::leu}, {"gtu", Compare::gtu}, {"geu", Compare::geu},
    {"num", Compare::num}, {"nan", Compare::nan}};

const std::unordered_map<std::string, AtomicOp> kAtomics = {
    {"add", AtomicOp::add},   {"min", AtomicOp::min}, {"max", AtomicOp::max},
    {"and", AtomicOp::and_},  {"or", AtomicOp::or_},  {"xor", AtomicOp::xor_},
    {"exch", AtomicOp::exch}, {"cas", AtomicOp::cas}, {"inc", AtomicOp::inc},
    {"dec", AtomicOp::dec}};

const std::unordered_map<std::string, Special> kSpecials = {
    {"%tid.x", Special::tid_x},
    {"%tid.y", Special::tid_y},
    {"%tid.z", Special::tid_z},
    {"%ntid.x", Special::ntid_x},
    {"%ntid.y", Special::ntid_y},
    {"%ntid.z", Special::ntid_z},
    {"%ctaid.x", Special::ctaid_x},
    {"%ctaid.y", Special::ctaid_y},
    {"%ctaid.z", Special::ctaid_z},
    {"%nctaid.x", Special::nctaid_x},
    {"%nctaid.y", Special::nctaid_y},
    {"%nctaid.z", Special::nctaid_z},
    {"%laneid", Special::laneid},
    {"%warpid", Special::warpid},
    {"%nwarpid", Special::nwarpid},
    {"%lanemask_lt", Special::lanemask_lt},
    {"%lanemask_le", Special::lanemask_le},
    {"%lanemask_gt", Special::lanemask_gt},
    {"%lanemask_ge", Special::lanemask_ge},
    {"%lanemask_eq", Special::lanemask_eq},
    {"%clock", Special::clock},
    {"%clock64", Special::clock},
    {"%globaltimer", Special::clock},
    {"%smid", Special::smid},
    {"%nsmid", Special::nsmid},
    {"%dynamic_smem_size", Special::dynamic_smem_size},
    {"%total_smem_size", Special::total_smem_size}};

// Variants that are kept in Instruction::mode.
const std::map<std::pair<Opcode, std::string>, std::uint8_t> kModes = {
    {{Opcode::shfl, "bfly"}, 0},
    {{Opcode::shfl, "idx"}, 1},
    {{Opcode::shfl, "up"}, 2},
    {{Opcode::shfl, "down"}, 3},
    {{Opcode::vote, "ballot"}, 0},
    {{Opcode::vote, "all"}, 1},
    {{Opcode::vote, "any"}, 2},
    {{Opcode::vote, "uni"}, 3},
    {{Opcode::match, "any"}, 0},
    {{Opcode::match, "all"}, 1},
    {{Opcode::shf, "r"}, 0},
    {{Opcode::shf, "l"}, 1},
    {{Opcode::bfind, "shiftamt"}, 1},
    {{Opcode::setp, "and"}, 1},
    {{Opcode::setp, "or"}, 2},
    {{Opcode::barrier_reduce, "and"}, 1},
    {{Opcode::barrier_reduce, "or"}, 2},
    {{Opcode::barrier_reduce, "popc"}, 0},
    {{Opcode::setp, "xor"}, 3},
    {{Opcode::set, "and"}, 1},
    {{Opcode::set, "or"}, 2},
    {{Opcode::set, "xor"}, 3},
    {{Opcode::prmt, "f4e"}, 1},
    {{Opcode::prmt, "b4e"}, 2},
    {{Opcode::prmt, "rc8"}, 3},
    {{Opcode::prmt, "ecl"}, 4},
    {{Opcode::prmt, "ecr"}, 5},
    {{Opcode::prmt, "rc16"}, 6},
    {{Opcode::testp, "finite"}, 0},
    {{Opcode::testp, "infinite"}, 1},
    {{Opcode::testp, "number"}, 2},
    {{Opcode::testp, "notanumber"}, 3},
    {{Opcode::testp, "normal"}, 4},
    {{Opcode::testp, "subnormal"}, 5}};

// Hints about caches and scheduling, which change no result.
const std::set<std::string> kHints = {"ca",       "cg",
                                      "cs",       "lu",
                                      "cv",       "wb",
                                      "wt",       "uni",
                                      "aligned",  "sync",
                                      "noftz",    "clamp",
                                      "async",    "row",
                                      "col",      "m8n8",
                                      "m16n8k8",  "m16n8k16",
                                      "m16n8k32", "m16n8k4",
                                      "x1",       "x2",
                                      "x4",       "L1",
                                      "L2",       "launch_dependents",
                                      "wait"};

// Kinds of state space that only a cluster of blocks has, and the like.
const std::set<std::string> kRefusedPrefixes = {"shared::cluster", "cluster",  "bulk",
                                                "tensor",          "multimem", "mbarrier"};

std::vector<std::string> split(const std::string& mnemonic) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = mnemonic.find('.', begin);
    parts.push_back(mnemonic.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

std::string demangle(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  // "void " of a template's name says nothing.
  return result.rfind("void ", 0) == 0 ? result.substr(5) : result;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Module run() {
    while (true) {
      const std::string token = next();
      if (token.empty()) break;
      if (token == ".version" || token == ".address_size") {
        skip_line();
      } else if (token == ".target") {
        std::sscanf(rest_of_line().c_str(), " sm_%d", &target_);
      } else if (token == ".file") {
        file();
      } else if (token == ".visible" || token == ".weak" || token == ".extern" ||
                 token == ".common") {
        // Linkage does not matter within one module.
      } else if (token == ".global" || token == ".const") {
        module_variable();
      } else if (token == ".shared") {
        const Declaration variable = declaration();
        expect(";");
        module_shared_[variable.name] = variable;
      } else if (token == ".entry") {
        entry();
      } else if (token == ".func") {
        skip_function();
      } else if (token == ".section") {
        while (!at_end() && next() != "}") {
        }
      } else if (token == ".pragma" || token == ".alias") {
        skip_statement();
      } else {
        fail("unexpected '" + token + "'");
      }
    }
    for (auto& [name, kernel] : module_.kernels) kernel->files = files_;
    return std::move(module_);
  }

 private:
  struct Declaration {
    std::string name;
    std::size_t bytes = 0, alignment = 1;
    unsigned element_size = 1;
    bool unsized = false;
    std::vector<std::uint64_t> values;
  };
  struct Symbol {
    Space space = Space::global;
    std::uint64_t offset = 0;
    bool dynamic = false;
    std::int32_t variable = -1;
  };

  // ---- text

  [[noreturn]] void fail(const std::string& what) const {
    std::string message = "PTX line " + std::to_string(line_);
    if (kernel_) message += ", kernel " + kernel_->readable_name;
    throw ParseError(message + ": " + what);
  }
  bool at_end() {
    skip_space();
    return at_ >= text_.size();
  }
  void skip_space() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
        line_ += text_[at_] == '\n';
        ++at_;
      } else if (text_.compare(at_, 2, "//") == 0) {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (text_.compare(at_, 2, "/*") == 0) {
        while (at_ < text_.size() && text_.compare(at_, 2, "*/") != 0) {
          line_ += text_[at_] == '\n';
          ++at_;
        }
        at_ = std::min(at_ + 2, text_.size());
      } else {
        return;
      }
    }
  }
  static bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
  }
  std::string next() {
    if (at_end()) return "";
    const std::size_t begin = at_;
    if (is_word(text_[at_])) {
      while (at_ < text_.size()) {
        if (is_word(text_[at_])) {
          ++at_;
        } else if (text_.compare(at_, 2, "::") == 0) {
          at_ += 2;
        } else {
          break;
        }
      }
    } else if (text_[at_] == '"') {
      ++at_;
      while (at_ < text_.size() && text_[at_] != '"') ++at_;
      ++at_;
    } else {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }
  std::string peek() {
    const std::size_t at = at_;
    const std::int32_t line = line_;
    std::string token = next();
    at_ = at;
    line_ = line;
    return token;
  }
  bool accept(const std::string& token) {
    if (peek() != token) return false;
    next();
    return true;
  }
  void expect(const std::string& token) {
    const std::string found = next();
    if (found != token) fail("expected '" + token + "', found '" + found + "'");
  }
  void skip_line() {
    while (at_ < text_.size() && text_[at_] != '\n') ++at_;
  }
  void skip_statement() {
    while (!at_end() && next() != ";") {
    }
  }
  // The words up to the end of the line.
  std::string rest_of_line() {
    const std::size_t begin = at_;
    skip_line();
    return text_.substr(begin, at_ - begin);
  }
  std::uint64_t number(const std::string& token) {
    std::string digits = token;
    if (digits.size() > 2 && digits[0] == '0' &&
        std::string("fFdD").find(digits[1]) != std::string::npos) {
      return std::stoull(digits.substr(2), nullptr, 16);
    }
    if (digits.back() == 'U') digits.pop_back();
    try {
      return std::stoull(digits, nullptr, 0);
    } catch (const std::exception&) {
      fail("'" + token + "' is not a number");
    }
  }

  // ---- declarations

  void file() {
    const std::size_t index = number(next());
    std::string name = next();
    skip_line();
    if (name.size() >= 2) name = name.substr(1, name.size() - 2);
    if (files_->size() <= index) files_->resize(index + 1);
    (*files_)[index] = name.substr(name.rfind('/') + 1);
  }
  // What follows ".global", ".shared", ".local" or ".param", up to "," or ";".
  Declaration declaration() {
    Declaration variable;
    Type type = Type::b8;
    std::size_t vector = 1;
    while (true) {
      const std::string token = next();
      if (token == ".align") {
        variable.alignment = number(next());
      } else if (token == ".ptr" || token == ".global" || token == ".const" || token == ".shared") {
        // The attributes of a pointer parameter promise what the checks test anyway.
      } else if (token == ".v2") {
        vector = 2;
      } else if (token == ".v4") {
        vector = 4;
      } else if (token[0] == '.') {
        const auto found = kTypes.find(token.substr(1));
        if (found == kTypes.end()) fail("unsupported attribute '" + token + "' of a variable");
        type = found->second;
      } else {
        variable.name = token;
        break;
      }
    }
    variable.element_size = size_of(type);
    variable.bytes = size_of(type) * vector;
    variable.alignment = std::max(variable.alignment, std::size_t{size_of(type)});
    while (accept("[")) {
      if (accept("]")) {
        variable.bytes = 0;
        variable.unsized = true;
      } else {
        variable.bytes *= number(next());
        expect("]");
      }
    }
    if (accept("=")) {
      if (accept("{")) {
        while (!accept("}")) {
          if (!accept(",")) variable.values.push_back(initial_value());
        }
      } else {
        variable.values.push_back(initial_value());
      }
    }
    return variable;
  }
  std::uint64_t initial_value() {
    const bool negative = accept("-");
    const std::string token = next();
    if (!std::isdigit(static_cast<unsigned char>(token[0]))) {
      fail("a variable that is initialised with the address '" + token + "' is not supported");
    }
    const std::uint64_t value = number(token);
    return negative ? 0 - value : value;
  }
  void module_variable() {
    const Declaration found = declaration();
    expect(";");
    Variable variable{found.name, found.bytes, std::max<std::size_t>(found.alignment, 1), {}};
    variable.initial.assign(found.bytes, 0);
    for (std::size_t i = 0; i < found.values.size(); ++i) {
      for (unsigned byte = 0; byte < found.element_size; ++byte) {
        const std::size_t at = i * found.element_size + byte;
        if (at < variable.initial.size()) {
          variable.initial[at] = static_cast<std::uint8_t>(found.values[i] >> (8 * byte));
        }
      }
    }
    symbols_[variable.name] = {Space::global, 0, false,
                               static_cast<std::int32_t>(module_.variables.size())};
    module_.variables.push_back(std::move(variable));
  }
  // Device functions are inlined where they can be run; what is left is refused at its call.
  void skip_function() {
    while (true) {
      const std::string token = next();
      if (token.empty() || token == ";") return;
      if (token == "{") break;
    }
    for (int depth = 1; depth > 0 && !at_end();) {
      const std::string token = next();
      depth += token == "{" ? 1 : token == "}" ? -1 : 0;
    }
  }

  // ---- kernels

  void entry() {
    auto kernel = std::make_shared<Kernel>();
    kernel->name = next();
    kernel->readable_name = demangle(kernel->name);
    kernel->target = target_;
    kernel_ = kernel.get();
    registers_.assign(1, {});
    labels_.clear();
    jumps_.clear();
    local_symbols_.clear();
    location_ = {};
    if (accept("(")) parameters();
    while (peek() != "{" && peek() != ";") entry_attribute();
    if (accept(";")) {
      kernel_ = nullptr;
      return;
    }
    next();
    body(1);
    for (const auto& [pc, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) fail("no label '" + label + "'");
      kernel->code[pc].target = found->second;
    }
    Instruction end;
    end.opcode = Opcode::exit;
    end.kind = Class::control;
    append(end, "ret");
    // Dynamic shared memory begins after the static part.
    kernel->shared_bytes = align_up(kernel->shared_bytes, 128);
    for (Instruction& instruction : kernel->code) {
      for (Operand& operand : instruction.operands) {
        if (operand.dynamic) operand.value += kernel->shared_bytes;
      }
    }
    share_registers(*kernel);
    module_.kernels[kernel->name] = std::move(kernel);
    kernel_ = nullptr;
  }
  void parameters() {
    while (!accept(")")) {
      if (accept(",")) continue;
      expect(".param");
      const Declaration found = declaration();
      std::size_t& end = kernel_->parameter_bytes;
      end = align_up(end, found.alignment);
      kernel_->parameters.push_back({found.name, end, found.bytes});
      local_symbols_[found.name] = {Space::param, end, false, -1};
      end += found.bytes;
    }
  }
  void entry_attribute() {
    const std::string token = next();
    if (token == ".maxntid" || token == ".reqntid") {
      auto& bound = token == ".maxntid" ? kernel_->max_threads : kernel_->required_threads;
      bound = {1, 1, 1};
      std::size_t dimension = 0;
      do {
        bound.at(dimension++) = static_cast<unsigned>(number(next()));
      } while (accept(","));
    } else if (token == ".minnctapersm" || token == ".maxnreg" || token == ".maxnctapersm") {
      next();
    } else {
      fail("unsupported attribute '" + token + "' of a kernel");
    }
  }
  void body(int depth) {
    while (true) {
      const std::string token = next();
      if (token.empty()) fail("the text ends within a kernel");
      if (token == "}") {
        if (depth > 1) registers_.pop_back();
        return;
      }
      if (token == "{") {
        registers_.emplace_back();
        body(depth + 1);
      } else if (token == ".reg") {
        register_declaration();
      } else if (token == ".shared" || token == ".local" || token == ".param") {
        const Declaration found = declaration();
        expect(";");
        // Parameters of a call live in local memory; the call itself is refused.
        const bool shared = token == ".shared";
        std::size_t& end = shared ? kernel_->shared_bytes : kernel_->local_bytes;
        end = align_up(end, found.alignment);
        local_symbols_[found.name] = {shared ? Space::shared : Space::local, end, false, -1};
        end += found.bytes;
      } else if (token == ".loc") {
        source_location();
      } else if (token[0] == '.') {
        skip_statement();
      } else if (token != "@" && peek() == ":") {
        next();
        // nvcc marks places for the debugger with labels that nothing jumps to.
        labels_[token] = static_cast<std::int32_t>(kernel_->code.size());
      } else {
        instruction(token);
      }
    }
  }
  void register_declaration() {
    next();  // the type: a register is 64 bits whatever it holds
    do {
      const std::string name = next();
      if (accept("<")) {
        const std::uint64_t count = number(next());
        expect(">");
        for (std::uint64_t i = 0; i < count; ++i) {
          registers_.back()[name + std::to_string(i)] = kernel_->registers++;
        }
      } else {
        registers_.back()[name] = kernel_->registers++;
      }
    } while (accept(","));
    expect(";");
  }
  // .loc FILE LINE COLUMN [, function_name LABEL, inlined_at FILE LINE COLUMN]
  void source_location() {
    const std::string text = rest_of_line();
    Location location;
    if (std::sscanf(text.c_str(), " %d %d", &location.file, &location.line) != 2) return;
    const std::size_t inlined = text.find("inlined_at");
    if (inlined != std::string::npos) {
      std::sscanf(text.c_str() + inlined + 10, " %d %d", &location.caller_file,
                  &location.caller_line);
    }
    // Line 0 is code that the compiler made; the line before it says more.
    if (location.line > 0) location_ = location;
  }
  std::int32_t find_register(const std::string& name) const {
    for (auto scope = registers_.rbegin(); scope != registers_.rend(); ++scope) {
      const auto found = scope->find(name);
      if (found != scope->end()) return found->second;
    }
    return -1;
  }

  // ---- operands

  Symbol symbol(const std::string& name) {
    if (const auto found = local_symbols_.find(name); found != local_symbols_.end()) {
      return found->second;
    }
    if (const auto found = module_shared_.find(name); found != module_shared_.end()) {
      Symbol shared{Space::shared, 0, found->second.unsized, -1};
      if (!shared.dynamic) {
        std::size_t& end = kernel_->shared_bytes;
        end = align_up(end, found->second.alignment);
        shared.offset = end;
        end += found->second.bytes;
      }
      return local_symbols_[name] = shared;
    }
    const auto found = symbols_.find(name);
    if (found == symbols_.end()) fail("unknown name '" + name + "'");
    return found->second;
  }
  void set_symbol(Operand& operand, const std::string& name, Instruction& in) {
    const Symbol found = symbol(name);
    operand.kind = Operand::Kind::immediate;
    operand.value = found.offset;
    operand.dynamic = found.dynamic;
    operand.symbol = found.variable;
    if (in.space == Space::param && found.space == Space::local) in.space = Space::local;
  }
  Operand element(const std::string& token, Instruction& in) {
    Operand operand;
    if (token == "-") {
      operand = element(next(), in);
      operand.value = 0 - operand.value;
      return operand;
    }
    if (token == "_") return operand;
    if (const std::int32_t found = find_register(token); found >= 0) {
      operand.kind = Operand::Kind::reg;
      operand.reg = found;
    } else if (const auto special = kSpecials.find(token); special != kSpecials.end()) {
      operand.kind = Operand::Kind::special;
      operand.value = static_cast<std::uint64_t>(special->second);
    } else if (token == "WARP_SZ") {
      operand.kind = Operand::Kind::immediate;
      operand.value = 32;
    } else if (std::isdigit(static_cast<unsigned char>(token[0]))) {
      operand.kind = Operand::Kind::immediate;
      operand.value = number(token);
    } else if (token[0] == '%') {
      fail("unsupported special register '" + token + "'");
    } else {
      set_symbol(operand, token, in);
    }
    return operand;
  }
  Operand address(Instruction& in) {
    Operand operand;
    const std::string base = next();
    if (const std::int32_t found = find_register(base); found >= 0) {
      operand.kind = Operand::Kind::reg;
      operand.reg = found;
    } else if (std::isdigit(static_cast<unsigned char>(base[0]))) {
      operand.kind = Operand::Kind::immediate;
      operand.value = number(base);
    } else {
      set_symbol(operand, base, in);
    }
    if (accept("+")) {
      const bool negative = accept("-");
      const std::uint64_t offset = number(next());
      operand.value += negative ? 0 - offset : offset;
    }
    expect("]");
    return operand;
  }
  Operand operand(Instruction& in) {
    const std::string token = next();
    if (token == "!") {
      Operand result = operand(in);
      result.negated = true;
      return result;
    }
    if (token == "[") return address(in);
    if (token == "{") {
      Operand result;
      result.kind = Operand::Kind::vector;
      std::vector<Operand> found;
      while (!accept("}")) {
        if (!accept(",")) found.push_back(element(next(), in));
      }
      result.reg = static_cast<std::int32_t>(kernel_->elements.size());
      result.reg2 = static_cast<std::int32_t>(found.size());
      kernel_->elements.insert(kernel_->elements.end(), found.begin(), found.end());
      return result;
    }
    Operand result = element(token, in);
    if (accept("|")) {
      const std::string second = next();
      if (second != "_") result.reg2 = find_register(second);
    }
    return result;
  }

  // ---- instructions

  void append(const Instruction& instruction, const std::string& mnemonic) {
    kernel_->code.push_back(instruction);
    kernel_->mnemonics.push_back(mnemonic);
    location_.ptx_line = line_;
    kernel_->locations.push_back(location_);
  }
  void instruction(std::string token) {
    Instruction in;
    const std::int32_t line = line_;
    if (token == "@") {
      in.guard_negated = accept("!");
      in.guard = find_register(next());
      if (in.guard < 0) fail("unknown guard");
      token = next();
    }
    if (!decode(token, in)) {
      skip_statement();
      const std::int32_t guard = in.guard;
      const bool negated = in.guard_negated;
      in = {};
      in.guard = guard;
      in.guard_negated = negated;
      in.kind = Class::control;
      append_at(line, in, token);
      return;
    }
    if (in.opcode == Opcode::bra) {
      jumps_.emplace_back(kernel_->code.size(), next());
      expect(";");
      append_at(line, in, token);
      return;
    }
    while (!accept(";")) {
      if (accept(",")) continue;
      if (in.operand_count == in.operands.size()) fail("too many operands of " + token);
      in.operands[in.operand_count++] = operand(in);
    }
    finish(in);
    append_at(line, in, token);
  }
  void append_at(std::int32_t line, const Instruction& in, const std::string& mnemonic) {
    const std::int32_t now = line_;
    line_ = line;
    append(in, mnemonic);
    line_ = now;
  }
  // Sets what the mnemonic says; false if any of its parts is not supported.
  bool decode(const std::string& mnemonic, Instruction& in) {
    const std::vector<std::string> parts = split(mnemonic);
    const auto found = kOpcodes.find(parts[0]);
    if (found == kOpcodes.end()) return false;
    in.opcode = found->second.opcode;
    in.kind = found->second.kind;
    if (in.opcode == Opcode::cp_async && (parts.size() < 2 || parts[1] != "async")) return false;
    if (in.opcode == Opcode::fence) in.order = Order::acquire_release;
    std::size_t types = 0;
    for (std::size_t i = 1; i < parts.size(); ++i) {
      if (const auto type = kTypes.find(parts[i]); type != kTypes.end()) {
        if (types < 4) in.types[types] = type->second;
        if (types == 0) in.type = type->second;
        if (types == 1) in.type2 = type->second;
        ++types;
      } else if (!modifier(parts[i], in)) {
        return false;
      }
    }
    return complete(in, types, mnemonic);
  }
  bool modifier(const std::string& name, Instruction& in) {
    const Opcode opcode = in.opcode;
    for (const std::string& prefix : kRefusedPrefixes) {
      if (name.rfind(prefix, 0) == 0) return false;
    }
    if (opcode == Opcode::barrier_sync && barrier_modifier(name, in)) return true;
    if (const auto mode = kModes.find({opcode, name}); mode != kModes.end()) {
      in.mode = mode->second;
      return true;
    }
    if (opcode == Opcode::setp || opcode == Opcode::set) {
      if (const auto compare = kCompares.find(name); compare != kCompares.end()) {
        in.compare = compare->second;
        return true;
      }
    }
    if (opcode == Opcode::atom || opcode == Opcode::red || opcode == Opcode::redux) {
      if (const auto atomic = kAtomics.find(name); atomic != kAtomics.end()) {
        in.atomic = atomic->second;
        return true;
      }
    }
    if (opcode == Opcode::cp_async) {
      if (name == "commit_group") return in.opcode = Opcode::cp_async_commit, true;
      if (name == "wait_group" || name == "wait_all") {
        in.opcode = Opcode::cp_async_wait;
        in.mode = name == "wait_all";
        return true;
      }
    }
    if (opcode == Opcode::mma && name.rfind("m", 0) == 0 && name.find('k') != std::string::npos) {
      int m = 0, n = 0, k = 0;
      std::sscanf(name.c_str(), "m%dn%dk%d", &m, &n, &k);
      in.shape = {static_cast<std::int16_t>(m), static_cast<std::int16_t>(n),
                  static_cast<std::int16_t>(k)};
      return true;
    }
    if (opcode == Opcode::ldmatrix) {
      if (name == "trans") return in.transposed = true;
      if (name == "x1" || name == "x2" || name == "x4") {
        in.vector = static_cast<std::uint8_t>(name[1] - '0');
        return true;
      }
    }
    return space_modifier(name, in) || rounding_modifier(name, in) || flag_modifier(name, in) ||
           order_modifier(name, in) || kHints.count(name) > 0 || name.rfind("L1::", 0) == 0 ||
           name.rfind("L2::", 0) == 0;
  }
  static bool barrier_modifier(const std::string& name, Instruction& in) {
    if (name == "warp") {
      in.opcode = Opcode::warp_sync;
      in.kind = Class::warp;
    } else if (name == "arrive") {
      in.opcode = Opcode::barrier_arrive;
    } else if (name == "red") {
      in.opcode = Opcode::barrier_reduce;
    } else if (name == "cta") {
      // The scope that it has anyway.
    } else {
      return false;
    }
    return true;
  }
  static bool space_modifier(const std::string& name, Instruction& in) {
    if (name == "global" || name == "const")
      in.space = Space::global;
    else if (name == "shared" || name == "shared::cta")
      in.space = Space::shared;
    else if (name == "local")
      in.space = Space::local;
    else if (name == "param" || name == "param::entry" || name == "param::func")
      in.space = Space::param;
    else if (name == "to")
      in.to_space = true;
    else
      return false;
    return true;
  }
  static bool rounding_modifier(const std::string& name, Instruction& in) {
    if (name == "rn")
      in.rounding = Rounding::nearest;
    else if (name == "rz")
      in.rounding = Rounding::zero;
    else if (name == "rm")
      in.rounding = Rounding::down;
    else if (name == "rp")
      in.rounding = Rounding::up;
    else if (name == "rni")
      in.to_integer = true;
    else if (name == "rzi")
      in.rounding = Rounding::zero, in.to_integer = true;
    else if (name == "rmi")
      in.rounding = Rounding::down, in.to_integer = true;
    else if (name == "rpi")
      in.rounding = Rounding::up, in.to_integer = true;
    else
      return false;
    return true;
  }
  static bool flag_modifier(const std::string& name, Instruction& in) {
    if (name == "lo" && in.opcode != Opcode::setp)
      in.low = true;
    else if (name == "hi" && in.opcode != Opcode::setp)
      in.high = true;
    else if (name == "wide")
      in.wide = true;
    else if (name == "ftz")
      in.flush = true;
    else if (name == "sat")
      in.saturate = true;
    else if (name == "relu")
      in.relu = true;
    else if (name == "approx" || name == "full")
      in.approximate = true;
    else if (name == "NaN")
      in.propagate_nan = true;
    else if (name == "cc")
      in.carry_out = true;
    else if (name == "nc")
      in.non_coherent = true;
    else if (name == "v2")
      in.vector = 2;
    else if (name == "v4")
      in.vector = 4;
    else if (name == "v8")
      in.vector = 8;
    else if (name == "wrap" && in.opcode == Opcode::shf)
      in.wide = true;
    else
      return false;
    return true;
  }
  static bool order_modifier(const std::string& name, Instruction& in) {
    if (name == "weak")
      in.order = Order::weak;
    else if (name == "volatile" || name == "relaxed" || name == "mmio")
      in.order = Order::relaxed, in.wide_scope = in.wide_scope || name == "volatile";
    else if (name == "acquire")
      in.order = Order::acquire;
    else if (name == "release")
      in.order = Order::release;
    else if (name == "acq_rel" || name == "sc")
      in.order = Order::acquire_release;
    else if (name == "gpu" || name == "gl" || name == "sys")
      in.wide_scope = true;
    else if (name == "cta")
      in.wide_scope = false;
    else
      return false;
    return true;
  }
  // What follows from the parts together.
  static bool complete(Instruction& in, std::size_t types, const std::string& mnemonic) {
    const Type type = in.type;
    const bool floating = is_float(type) || is_packed(type);
    switch (in.opcode) {
      case Opcode::add:
      case Opcode::sub:
      case Opcode::mul:
      case Opcode::min:
      case Opcode::max:
      case Opcode::abs:
      case Opcode::neg:
      case Opcode::div:
      case Opcode::mad:
      case Opcode::setp:
      case Opcode::set:
        if (is_float(type) || is_packed(type)) in.kind = Class::floating;
        if (in.opcode == Opcode::mad && floating) in.opcode = Opcode::fma;
        if (in.opcode == Opcode::mad && in.carry_out) return false;
        if (in.opcode == Opcode::div && in.approximate) in.kind = Class::special;
        // Comparisons of packed halves have two results of their own.
        if ((in.opcode == Opcode::setp || in.opcode == Opcode::set) &&
            is_packed(in.opcode == Opcode::set ? in.type2 : type))
          return false;
        if (types > 1 && in.opcode != Opcode::set && in.opcode != Opcode::setp) return false;
        return types > 0;
      case Opcode::cvt:
        if (types != 2 && !(types == 3 && type == Type::none)) {
          // cvt.rn.bf16x2.f32 has two types; the others with three are conversions to 8 bits.
          return false;
        }
        return !(is_packed(type) && in.type2 != Type::f32) && !is_packed(in.type2);
      case Opcode::atom:
      case Opcode::red:
        // Without an order an atomic operation is relaxed, and without a scope it is the GPU's.
        if (in.order == Order::weak) in.order = Order::relaxed;
        if (mnemonic.find(".cta") == std::string::npos) in.wide_scope = true;
        return in.vector == 1 && in.atomic != AtomicOp::none && types == 1;
      case Opcode::ex2:
      case Opcode::tanh:
        return type == Type::f32 || type == Type::f16 || type == Type::bf16 || is_packed(type);
      case Opcode::lg2:
      case Opcode::sin:
      case Opcode::cos:
        return type == Type::f32;
      case Opcode::rcp:
      case Opcode::sqrt:
      case Opcode::rsqrt:
        return type == Type::f32 || type == Type::f64;
      case Opcode::mma:
        return supported_mma(in, types) && mnemonic.find(".row.col.") != std::string::npos;
      case Opcode::ldmatrix:
        return mnemonic.find(".m8n8.") != std::string::npos && type == Type::b16 &&
               (in.space == Space::shared || in.space == Space::generic);
      case Opcode::cp_async:
        return in.space == Space::shared || mnemonic.find(".shared") != std::string::npos;
      case Opcode::vote:
        return mnemonic.find(".sync") != std::string::npos;
      case Opcode::shfl:
      case Opcode::match:
      case Opcode::redux:
        return mnemonic.find(".sync") != std::string::npos && !is_float(type);
      case Opcode::fence:
        return mnemonic.find("proxy") == std::string::npos &&
               mnemonic.find("mbarrier") == std::string::npos;
      default:
        return true;
    }
  }
  static bool supported_mma(const Instruction& in, std::size_t types) {
    if (types != 4 || in.shape[0] != 16 || in.shape[1] != 8) return false;
    const auto is = [&](std::size_t i, Type type) { return in.types[i] == type; };
    const auto byte = [&](std::size_t i) { return is(i, Type::s8) || is(i, Type::u8); };
    if (byte(1) && byte(2)) {
      return is(0, Type::s32) && is(3, Type::s32) && (in.shape[2] == 16 || in.shape[2] == 32);
    }
    const bool halves =
        (is(1, Type::f16) && is(2, Type::f16)) || (is(1, Type::bf16) && is(2, Type::bf16));
    return halves && is(0, Type::f32) && is(3, Type::f32) &&
           (in.shape[2] == 8 || in.shape[2] == 16);
  }
  static Type result_type(const Instruction& in) {
    switch (in.opcode) {
      case Opcode::popc:
      case Opcode::clz:
      case Opcode::bfind:
      case Opcode::dp4a:
      case Opcode::dp2a:
      case Opcode::lop3:
      case Opcode::shf:
      case Opcode::prmt:
      case Opcode::bmsk:
        return Type::b32;
      case Opcode::mul:
      case Opcode::mad:
        return !in.wide ? in.type : size_of(in.type) == 4 ? Type::b64 : Type::b32;
      case Opcode::testp:
        return Type::pred;
      default:
        return in.type;
    }
  }
  // What only the operands tell.
  void finish(Instruction& in) const {
    in.result = result_type(in);
    if (in.opcode == Opcode::cp_async) in.space = Space::shared;
    // min and max of three operands are newer than the machine.
    if ((in.opcode == Opcode::min || in.opcode == Opcode::max) && in.operand_count != 3) {
      in.opcode = Opcode::unsupported;
    }
  }

  const std::string& text_;
  std::size_t at_ = 0;
  std::int32_t line_ = 1;
  Module module_;
  std::shared_ptr<std::vector<std::string>> files_ = std::make_shared<std::vector<std::string>>();
  int target_ = 0;
  std::unordered_map<std::string, Symbol> symbols_;
  std::unordered_map<std::string, Declaration> module_shared_;
  // Of the kernel at hand.
  Kernel* kernel_ = nullptr;
  std::vector<std::unordered_map<std::string, std::int32_t>> registers_;  // one a scope
  std::unordered_map<std::string, std::int32_t> labels_;
  std::vector<std::pair<std::size_t, std::string>> jumps_;
  std::unordered_map<std::string, Symbol> local_symbols_;
  Location location_;
};

}  // namespace

Module parse_ptx(const std::string& text) { return Parser(text).run(); }

std::string Kernel::where(std::size_t pc) const {
  const Location& location = locations.at(pc);
  const auto file_name = [&](std::int32_t file) {
    const auto index = static_cast<std::size_t>(file);
    return files && index < files->size() ? (*files)[index] : std::string("?");
  };
  if (location.file < 0) return "PTX line " + std::to_string(location.ptx_line);
  std::string text = file_name(location.file) + ":" + std::to_string(location.line);
  if (location.caller_file >= 0) {
    text += " (inlined at " + file_name(location.caller_file) + ":" +
            std::to_string(location.caller_line) + ")";
  }
  return text;
}

std::vector<std::string> Kernel::unsupported() const {
  std::vector<std::string> found;
  for (std::size_t pc = 0; pc < code.size(); ++pc) {
    if (code[pc].opcode == Opcode::unsupported) found.push_back(mnemonics[pc] + " at " + where(pc));
  }
  return found;
}

std::shared_ptr<const Kernel> Module::find(const std::string& name) const {
  std::shared_ptr<const Kernel> part;
  int matches = 0;
  for (const auto& [mangled, kernel] : kernels) {
    if (mangled == name || kernel->readable_name == name) return kernel;
    if (mangled.find(name) != std::string::npos ||
        kernel->readable_name.find(name) != std::string::npos) {
      part = kernel;
      ++matches;
    }
  }
  if (matches != 1) {
    throw ParseError((matches ? "more than one kernel is called " : "no kernel is called ") + name);
  }
  return part;
}

}  // namespace verkv::cpu_device
