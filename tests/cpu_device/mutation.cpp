#include "mutation.hpp"

#include <cstddef>
#include <sstream>

namespace verkv::cpu_device {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool is_barrier(const std::string& line, bool warp) {
  if (contains(line, "bar.warp.sync")) return warp;
  return contains(line, "bar.sync") || contains(line, "barrier.sync") ||
         contains(line, "barrier.cta.sync");
}

}  // namespace

std::vector<Mutant> without_one_barrier(const std::string& ptx, const std::string& kernel,
                                        bool warp) {
  std::vector<std::string> lines;
  std::istringstream text(ptx);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  std::vector<Mutant> mutants;
  bool inside = false;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (contains(lines[i], ".entry ")) inside = contains(lines[i], kernel);
    if (!inside || !is_barrier(lines[i], warp)) continue;
    Mutant mutant;
    mutant.what =
        "line " + std::to_string(i + 1) + ": " + lines[i].substr(lines[i].find_first_not_of(" \t"));
    for (std::size_t j = 0; j < lines.size(); ++j) mutant.ptx += (j == i ? "" : lines[j]) + '\n';
    mutants.push_back(std::move(mutant));
  }
  return mutants;
}

std::vector<std::uint32_t> barriers_of(const Kernel& kernel) {
  std::vector<std::uint32_t> found;
  for (std::uint32_t pc = 0; pc < kernel.code.size(); ++pc) {
    const Opcode opcode = kernel.code[pc].opcode;
    if (opcode == Opcode::barrier_sync || opcode == Opcode::warp_sync) found.push_back(pc);
  }
  return found;
}

std::shared_ptr<const Kernel> without_instruction(const Kernel& kernel, std::uint32_t instruction) {
  auto changed = std::make_shared<Kernel>(kernel);
  Instruction nothing;
  nothing.opcode = Opcode::no_effect;
  changed->code.at(instruction) = nothing;
  return changed;
}

}  // namespace verkv::cpu_device
