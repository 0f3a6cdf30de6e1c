// The truth that a replay is measured against.
#ifndef VERKV_EXAMPLES_REPLAY_REFERENCE_HPP
#define VERKV_EXAMPLES_REPLAY_REFERENCE_HPP

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <verkv/recorded_cache.hpp>

namespace verkv::replay {

// The truth of one layer: dense attention in double over what is stored.
struct Reference {
  std::vector<double> output;  // [step][query head][value_dim]
  std::vector<double> norm;    // [step][query head], of the output
  std::vector<double> lse;

  std::span<const double> row(std::int64_t index, std::int64_t dim) const {
    return std::span(output).subspan(static_cast<std::size_t>(index * dim),
                                     static_cast<std::size_t>(dim));
  }
};

// Of the layers at these places of cache.layers(), for the first `steps` decode steps.
std::vector<Reference> make_references(const RecordedCache& cache,
                                       const std::vector<std::size_t>& places, std::int64_t steps,
                                       std::int64_t threads);

}  // namespace verkv::replay

#endif  // VERKV_EXAMPLES_REPLAY_REFERENCE_HPP
