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

}  // namespace verkv::cpu_device
