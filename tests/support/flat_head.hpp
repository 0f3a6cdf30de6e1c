// What a HeadStore holds, side by side, for tests that look at all of it.
#ifndef VERKV_TESTS_SUPPORT_FLAT_HEAD_HPP
#define VERKV_TESTS_SUPPORT_FLAT_HEAD_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <verkv/clusters.hpp>

#include "cpu/head_store.hpp"

namespace verkv::test {

struct FlatHead {
  std::vector<std::byte> host_rows;  // [position]: key, then value
  // By resident slot; the places of the window are its positions.
  std::vector<std::byte> resident_keys, resident_values;
  std::vector<std::uint32_t> resident_places;
  // By place, in whole groups of 16.
  std::vector<std::uint8_t> codes;
  std::vector<Positive16> scales, odds;
  // By cluster.
  std::vector<std::byte> centroids;
  std::vector<Positive16> spreads;
  std::vector<float> channel_means;
};

inline FlatHead flat(const cpu::HeadStore& store, const cpu::LayerShape& shape) {
  FlatHead result;
  const auto add = [](auto& to, const void* from, std::int64_t bytes) {
    const std::size_t before = to.size();
    to.resize(before + static_cast<std::size_t>(bytes) / sizeof(to[0]));
    std::memcpy(reinterpret_cast<std::byte*>(to.data() + before), from,
                static_cast<std::size_t>(bytes));
  };
  const auto add_rows = [&](auto& to, const cpu::PagedRows& rows) {
    for (std::int64_t i = 0; i < rows.size(); ++i) add(to, rows.row(i), rows.row_bytes());
  };
  with_element(shape.storage, [&](auto zero) {
    const Rows keys = store.host().keys(shape);
    for (std::int64_t i = 0; i < store.tokens(); ++i)
      add(result.host_rows, row_of<decltype(zero)>(keys, i), shape.row_bytes());
  });
  const std::int64_t end = store.compressed();
  if (end > 0) {
    add_rows(result.resident_keys, store.drawn().key);
    add_rows(result.resident_values, store.drawn().value);
    store.drawn().each_place(
        [&](std::int64_t, std::uint32_t place) { result.resident_places.push_back(place); });
    const bool coded = has_codes(shape.sketch.kind);
    for (std::int64_t first = 0; first < end; first += kSketchGroup) {
      add(result.odds, store.odds(first), kSketchGroup * std::int64_t{sizeof(Positive16)});
      if (!coded) continue;
      add(result.scales, store.scales(first), kSketchGroup * std::int64_t{sizeof(Positive16)});
      add(result.codes, store.codes(first), code_storage_bytes(store.sketch(shape), kSketchGroup));
    }
    const auto& means = store.basis().channel_means;
    result.channel_means.assign(means.begin(), means.end());
  }
  if (shape.clusters && end > 0) {
    with_element(shape.storage, [&](auto zero) {
      const Rows centroids = store.centroids(shape);
      for (std::int64_t c = 0; c < clusters_of(end); ++c) {
        add(result.centroids, row_of<decltype(zero)>(centroids, c),
            shape.config.value_dim * std::int64_t{sizeof zero});
        result.spreads.push_back(store.spread(c));
      }
    });
  }
  add_rows(result.resident_keys, store.window().key);
  add_rows(result.resident_values, store.window().value);
  for (std::int64_t i = end; i < store.tokens(); ++i)
    result.resident_places.push_back(static_cast<std::uint32_t>(i));
  return result;
}

}  // namespace verkv::test

#endif  // VERKV_TESTS_SUPPORT_FLAT_HEAD_HPP
