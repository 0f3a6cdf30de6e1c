// Invented texts of three kinds to run a model over, the same on every machine.
#ifndef VERKV_BENCH_TEXT_QUALITY_TEXTS_HPP
#define VERKV_BENCH_TEXT_QUALITY_TEXTS_HPP

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace verkv::lab {

// prose: a chronicle whose persons, things and events recur.
// code: Python and C++ modules whose definitions use earlier ones.
// uuids: numbered entries, some of them copies of earlier entries.
enum class TextKind { prose, code, uuids };

std::string_view name(TextKind kind);
std::optional<TextKind> parse_text_kind(std::string_view text);

// At least `bytes` bytes of ASCII, deterministic in (kind, seed). The text ends with the first
// whole paragraph (definition, line) that reaches the length, so a longer text begins with a
// shorter one.
std::string generate_text(TextKind kind, std::uint64_t seed, std::size_t bytes);

// The same for one kind each.
std::string prose_text(std::uint64_t seed, std::size_t bytes);
std::string code_text(std::uint64_t seed, std::size_t bytes);
std::string uuid_text(std::uint64_t seed, std::size_t bytes);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_TEXTS_HPP
