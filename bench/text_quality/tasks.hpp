// Invented long-context tasks in the manner of RULER (Hsieh et al., "RULER: What's the real context
// size of your long-context language models?", COLM 2024). None of its texts is used.
#ifndef VERKV_BENCH_TEXT_QUALITY_TASKS_HPP
#define VERKV_BENCH_TEXT_QUALITY_TASKS_HPP

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace verkv::lab {

enum class TaskKind {
  single,  // one key with a 7-digit number, hidden in prose
  mk1,     // four such keys, one is asked for
  mk3,     // nothing but UUID keys with UUID values, one is asked for
  mv,      // one key with four numbers in four places, all are asked for
  cwe,     // a word list, the ten most frequent words are asked for
  qa1,     // short lives of invented persons, one fact is asked for
};

std::string_view name(TaskKind kind);
std::optional<TaskKind> parse_task_kind(std::string_view text);

// For a plain completion of context + question. The question begins with a newline and ends with
// the beginning of its answer, in the words of the context and without a space at the end.
struct Task {
  std::string context;
  std::string question;
  std::vector<std::string> answers;
  std::int64_t max_new_tokens = 0;
};

// The smallest context of a kind, in bytes.
std::size_t minimum_context_bytes(TaskKind kind);
// Beyond this the invented words would run out.
inline constexpr std::size_t kMaxContextBytes = std::size_t{1} << 19;

// Deterministic in its arguments. The context has at most context_bytes bytes and misses them by
// less than 1024. The ten most frequent words of cwe come 30 times, or context_bytes / 280 times
// where that is less, and all others 3 times. Throws InvalidArgument where context_bytes is below
// minimum_context_bytes(kind) or above kMaxContextBytes.
Task generate_task(TaskKind kind, std::uint64_t seed, std::size_t context_bytes);

// The share of the answers that the text contains, from 0 to 1; 1 for a task without answers. Case
// does not matter; an answer counts only where no letter or digit touches it.
double task_score(const Task& task, std::string_view generated);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_TASKS_HPP
