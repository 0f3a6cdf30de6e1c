// Random operations on a cache on the CPU, with faults on the way, against a dense model and a twin
// (property/world.hpp). Environment: VERKV_PROPERTY_OPERATIONS, VERKV_PROPERTY_SEED, and
// VERKV_PROPERTY_TRACE, which prints each operation before it is done (docs/CONTRIBUTING.md).
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "catch.hpp"
#include "property/world.hpp"

namespace {

using verkv::test::Tallies;
using verkv::test::Violation;
using verkv::test::World;

// Of one cache; the next run has another configuration.
constexpr int kOperations = 400;

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Failure {
  std::string text;
  int operation = 0;
  std::vector<std::string> done;
};

// The operations that `chosen` names, in a world of its own. Ends with the first violation.
std::optional<Failure> run(std::uint64_t seed, const std::vector<int>& chosen, Tallies& tallies) {
  static const bool trace = std::getenv("VERKV_PROPERTY_TRACE") != nullptr;
  World world(seed, tallies, trace ? &std::cerr : nullptr);
  if (trace) std::cerr << "seed " << seed << ": " << world.configuration() << std::endl;
  Failure failure;
  try {
    for (const int i : chosen) {
      failure.operation = i;
      if (trace) std::cerr << "\n" << i << ":" << std::flush;
      world.operate((seed << 20) + static_cast<std::uint64_t>(i));
      failure.done.push_back(std::to_string(i) + ":" + world.last());
    }
    failure.operation = kOperations;
    world.end();
    return std::nullopt;
  } catch (const Violation& violation) {
    failure.text = violation.what();
    failure.done.push_back(std::to_string(failure.operation) + ":" + world.last() + "   <- " +
                           failure.text);
    return failure;
  }
}

// Leaves operations out as long as something is still violated.
Failure shrunk(std::uint64_t seed, std::vector<int> chosen, Failure failure) {
  int runs = 0;
  const auto end = std::find(chosen.begin(), chosen.end(), failure.operation);
  if (end != chosen.end()) chosen.erase(end + 1, chosen.end());
  for (std::size_t part = chosen.size() / 2; part > 0 && runs < 400; part /= 2) {
    for (std::size_t at = 0; at + part <= chosen.size() && runs < 400; ++runs) {
      std::vector<int> fewer = chosen;
      const auto from = fewer.begin() + static_cast<std::ptrdiff_t>(at);
      fewer.erase(from, from + static_cast<std::ptrdiff_t>(part));
      Tallies ignored;
      if (const auto still = run(seed, fewer, ignored)) {
        chosen = fewer;
        failure = *still;
      } else {
        at += part;
      }
    }
  }
  return failure;
}

}  // namespace

TEST_CASE("Random operations leave every sequence as a dense model and a twin of its own have it") {
  const std::uint64_t seed = number_from("VERKV_PROPERTY_SEED", 1);
  const auto operations =
      static_cast<std::int64_t>(number_from("VERKV_PROPERTY_OPERATIONS", 100'000));
  std::vector<int> all;
  for (int i = 0; i < kOperations; ++i) all.push_back(i);
  Tallies tallies;
  for (std::int64_t done = 0; done < operations; done += kOperations) {
    const std::uint64_t one = seed + static_cast<std::uint64_t>(done / kOperations);
    const auto failure = run(one, all, tallies);
    if (!failure) continue;
    std::string text = "violated: " + failure->text +
                       "\nagain with VERKV_PROPERTY_SEED=" + std::to_string(one) +
                       " VERKV_PROPERTY_OPERATIONS=" + std::to_string(kOperations) + "\n" +
                       World(one, tallies).configuration();
    text += "\noperations that suffice for a violation:";
    for (const std::string& line : shrunk(one, all, *failure).done) text += "\n  " + line;
    FAIL(text);
  }
  std::string text;
  for (const auto& [name, count] : tallies.done) {
    text += name + " " + std::to_string(count) + " (refused " +
            std::to_string(tallies.refused[name]) + "), ";
  }
  INFO(text << tallies.out_of_memory << " out of memory, " << tallies.exact_answers << " exact, "
            << tallies.estimated_answers << " estimated, " << tallies.certified << " certified, "
            << tallies.broken << " of them broken, " << tallies.chunks << " chunks");
  // The run has met what it is for.
  if (operations >= 100'000) {
    CHECK(tallies.out_of_memory > 500);
    CHECK(tallies.exact_answers > 50'000);
    CHECK(tallies.estimated_answers > 20'000);
    CHECK(tallies.chunks > 1'000);
    CHECK(tallies.certified > 1'000);
  }
  CHECK(static_cast<double>(tallies.broken) <= 0.1 * static_cast<double>(tallies.certified));
}
