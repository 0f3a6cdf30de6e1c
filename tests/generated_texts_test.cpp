// The generated texts and tasks of the laboratory (bench/text_quality): what they contain, how
// often, and that they are the same everywhere.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <verkv/error.hpp>

#include "../bench/text_quality/tasks.hpp"
#include "../bench/text_quality/texts.hpp"
#include "../bench/text_quality/word_lists.hpp"
#include "catch.hpp"

namespace {

using namespace verkv::lab;

constexpr TextKind kTexts[] = {TextKind::prose, TextKind::code, TextKind::uuids};
constexpr TaskKind kTasks[] = {TaskKind::single, TaskKind::mk1, TaskKind::mk3,
                               TaskKind::mv,     TaskKind::cwe, TaskKind::qa1};

std::size_t occurrences(std::string_view text, std::string_view part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

bool starts_with(std::string_view text, std::string_view part) {
  return text.substr(0, part.size()) == part;
}

// Printable ASCII and newlines only.
bool clean(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// FNV-1a: fixes the bytes across compilers and standard libraries.
std::uint64_t fingerprint(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// What stands between the question's subject and its answer, in the words of the context.
std::string answer_prefix(const Task& task) {
  return task.question.substr(task.question.find("\nAnswer: ") + 9);
}

}  // namespace

TEST_CASE("kinds are found by their names only") {
  for (const TextKind kind : kTexts) CHECK(parse_text_kind(name(kind)) == kind);
  for (const TaskKind kind : kTasks) CHECK(parse_task_kind(name(kind)) == kind);
  for (const std::string_view text : {"", "Prose", "prose ", "mk2", "SINGLE", "uuid"}) {
    CHECK_FALSE(parse_text_kind(text).has_value());
    CHECK_FALSE(parse_task_kind(text).has_value());
  }
}

TEST_CASE("a text depends on kind and seed, reaches its length and begins with the shorter ones") {
  for (const TextKind kind : kTexts) {
    CAPTURE(name(kind));
    CHECK(generate_text(kind, 1, 0).empty());
    const std::string longest = generate_text(kind, 7, 150000);
    CHECK(clean(longest));
    for (const std::size_t bytes : {1u, 100u, 1000u, 4096u, 32768u, 150000u}) {
      const std::string text = generate_text(kind, 7, bytes);
      CHECK(text.size() >= bytes);
      CHECK(text.size() < bytes + 4096);
      CHECK(text == generate_text(kind, 7, bytes));
      CHECK(starts_with(longest, text));
    }
    std::set<std::string> texts;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      texts.insert(generate_text(kind, seed, 2000).substr(0, 1000));
    }
    CHECK(texts.size() == 20);
  }
}

TEST_CASE("word lists are read by heading, and what is missing is named") {
  const std::string file = "For the reader.\n\n=== one\na b\n\nc\n=== two | x |\n\n  d\n";
  const std::vector<Section> read = sections(file);
  REQUIRE(read.size() == 2);
  CHECK(read[0].heading == "one");
  CHECK(read[0].body == "a b\n\nc\n");
  CHECK(fields(read[1].heading) == std::vector<std::string_view>{"two", "x", ""});
  CHECK(read[1].body == "\n  d\n");
  const WordLists lists(file);
  REQUIRE(lists["one"].size() == 2);
  CHECK(lists["one"][1] == "c");
  try {
    (void)lists["three"];
    FAIL("no exception");
  } catch (const verkv::InvalidArgument& error) {
    CHECK(std::string(error.what()).find("\"three\"") != std::string::npos);
  }
  CHECK(sections("").empty());
  CHECK(sections("no heading").empty());
}

TEST_CASE("texts are the same on every machine") {
  CHECK(fingerprint(generate_text(TextKind::prose, 1, 100000)) == 0xd601da887203d69bull);
  CHECK(fingerprint(generate_text(TextKind::code, 1, 100000)) == 0xff9b72c003a8efd6ull);
  CHECK(fingerprint(generate_text(TextKind::uuids, 1, 100000)) == 0x84b5fe1a9f07ba44ull);
  // Other seeds, all kinds together.
  std::string all;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    for (const TextKind kind : kTexts) all += generate_text(kind, seed, 60000);
    for (const TaskKind kind : kTasks) {
      const Task task = generate_task(kind, seed, 9999);
      all += task.context + task.question;
      for (const std::string& answer : task.answers) all += answer;
    }
  }
  CHECK(fingerprint(all) == 0x123793fd4ceebd38ull);
}

TEST_CASE("tasks are the same on every machine") {
  const std::map<TaskKind, std::uint64_t> expected = {
      {TaskKind::single, 0x2ffbf8dfb6d85538ull}, {TaskKind::mk1, 0x7e5e925f2df82413ull},
      {TaskKind::mk3, 0xc755e4b657775f65ull},    {TaskKind::mv, 0xf8a549a1a3c29fcdull},
      {TaskKind::cwe, 0xcd9c4d6bb4d81446ull},    {TaskKind::qa1, 0xafd65ddf4e510368ull}};
  for (const TaskKind kind : kTasks) {
    CAPTURE(name(kind));
    const Task task = generate_task(kind, 1, 20000);
    CHECK(fingerprint(task.context + task.question + task.answers[0]) == expected.at(kind));
  }
}

TEST_CASE("prose is whole, varied and comes back to its persons") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const std::string text = generate_text(TextKind::prose, seed, 60000);
    CHECK(text.find_first_of("{}$") == std::string::npos);
    for (const std::string_view flaw :
         {"  ", " ,", " .", "..", ",,", " \n", "\n\n\n", " a a", " a e", " a i", " a o"}) {
      CAPTURE(seed, flaw);
      CHECK(occurrences(text, flaw) == 0);
    }
    CHECK(occurrences(text, "\"") % 2 == 0);
    CHECK(occurrences(text, "Chapter ") >= 5);
    CHECK(occurrences(text, " had ") >= 50);

    // Sentences repeat as little as in a book.
    std::vector<std::string> sentences;
    std::string sentence;
    for (const char c : text) {
      sentence += c;
      if (c == '.' || c == '\n') {
        if (sentence.size() > 40) sentences.push_back(sentence);
        sentence.clear();
      }
    }
    const std::set<std::string> different(sentences.begin(), sentences.end());
    CHECK(sentences.size() > 300);
    CHECK(static_cast<double>(different.size()) > 0.93 * static_cast<double>(sentences.size()));
  }
}

TEST_CASE("code uses what it defined") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const std::string text = generate_text(TextKind::code, seed, 60000);
    CHECK(text.find('$') == std::string::npos);
    CHECK(occurrences(text, "\ndef ") > 20);
    CHECK(occurrences(text, "\nstruct ") > 2);
    CHECK(occurrences(text, "(") == occurrences(text, ")"));
    CHECK(occurrences(text, "{") == occurrences(text, "}"));
    // Each call of a mean is below its definition.
    for (const std::string& line : lines_of(text)) {
      const std::size_t at = line.find("{mean_");
      if (at == std::string::npos) continue;
      const std::string called = line.substr(at + 1, line.find('(', at) - at);
      CAPTURE(called);
      CHECK(text.find("def " + called) < text.find("{" + called));
    }
  }
}

TEST_CASE("copies of uuid entries agree with the originals") {
  const std::string text = generate_text(TextKind::uuids, 3, 100000);
  std::map<std::string, std::string> entries;
  std::set<std::string> values;
  std::size_t copies = 0;
  for (const std::string& line : lines_of(text)) {
    const std::size_t colon = line.find(": ");
    REQUIRE(colon != std::string::npos);
    const std::string content = line.substr(colon + 2);
    if (starts_with(line, "copy of entry ")) {
      ++copies;
      const auto original = entries.find(line.substr(8, colon - 8));
      REQUIRE(original != entries.end());
      CHECK(original->second == content);
    } else {
      CHECK(entries.emplace(line.substr(0, colon), content).second);
      CHECK(line.substr(0, colon) == "entry " + std::to_string(entries.size()));
      const std::string value = content.substr(content.find(" -> ") + 4);
      CHECK(value.size() == 36);
      CHECK(value[14] == '4');
      CHECK(values.insert(value).second);
    }
  }
  CHECK(copies > entries.size() / 5);
  CHECK(copies < entries.size() / 2);
}

TEST_CASE("a task depends on kind and seed and keeps to its length") {
  for (const TaskKind kind : kTasks) {
    CAPTURE(name(kind));
    const std::size_t least = minimum_context_bytes(kind);
    std::vector<std::size_t> sizes = {least, least + 1, 3000, 4096, 9999, 32768, 131072};
    for (const std::size_t bytes : sizes) {
      for (std::uint64_t seed = 0; seed < 8; ++seed) {
        CAPTURE(bytes, seed);
        const Task task = generate_task(kind, seed, bytes);
        CHECK(task.context.size() <= bytes);
        CHECK(task.context.size() + 1024 > bytes);
        CHECK(clean(task.context));
        CHECK(clean(task.question));
        CHECK(task.context.find('$') == std::string::npos);
        CHECK(task.context.back() != ' ');
        CHECK(task.context.back() != '\n');
        CHECK(task.question.front() == '\n');
        CHECK(task.question.back() != ' ');
        CHECK(task.max_new_tokens > 0);
        CHECK(task_score(task, task.context) == 1.0);
        CHECK(task_score(task, task.question) == 0.0);
        const Task again = generate_task(kind, seed, bytes);
        CHECK(task.context == again.context);
        CHECK(task.question == again.question);
        CHECK(task.answers == again.answers);
        const Task other = generate_task(kind, seed + 100, bytes);
        CHECK(task.context != other.context);
        CHECK(task.answers != other.answers);
      }
    }
    const Task longest = generate_task(kind, 1, kMaxContextBytes);
    CHECK(longest.context.size() + 1024 > kMaxContextBytes);
    CHECK(longest.context.size() <= kMaxContextBytes);
  }
}

TEST_CASE("a context that is too small or too large is refused with the limit") {
  for (const TaskKind kind : kTasks) {
    const std::size_t least = minimum_context_bytes(kind);
    for (const std::size_t bytes : {std::size_t{0}, least - 1}) {
      try {
        generate_task(kind, 1, bytes);
        FAIL("no exception");
      } catch (const verkv::InvalidArgument& error) {
        const std::string text = error.what();
        CHECK(text.find(" " + std::to_string(bytes) + " ") != std::string::npos);
        CHECK(text.find(std::to_string(least)) != std::string::npos);
      }
    }
    CHECK_THROWS_AS(generate_task(kind, 1, kMaxContextBytes + 1), verkv::InvalidArgument);
  }
}

TEST_CASE("single and mk1 hide exactly their needles") {
  for (const TaskKind kind : {TaskKind::single, TaskKind::mk1}) {
    const std::size_t needles = kind == TaskKind::single ? 1 : 4;
    std::set<std::size_t> depths;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      CAPTURE(name(kind), seed);
      const Task task = generate_task(kind, seed, 8000);
      CHECK(occurrences(task.context, "secret number") == needles);
      REQUIRE(task.answers.size() == 1);
      CHECK(task.answers[0].size() == 7);
      CHECK(occurrences(task.context, task.answers[0]) == 1);
      // The answer continues the question as the needle says it.
      const std::string needle = answer_prefix(task) + " " + task.answers[0] + ".";
      CHECK(occurrences(task.context, needle) == 1);
      const std::size_t at = task.context.find(needle);
      depths.insert(at * 4 / task.context.size());
      CHECK((at == 0 || task.context[at - 1] == ' ' || task.context[at - 1] == '\n'));
    }
    CHECK(depths.size() == 4);
  }
}

TEST_CASE("mv asks for four numbers of one key") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Task task = generate_task(TaskKind::mv, seed, 8000);
    REQUIRE(task.answers.size() == 4);
    CHECK(std::set<std::string>(task.answers.begin(), task.answers.end()).size() == 4);
    CHECK(occurrences(task.context, "secret number") == 4);
    const std::string prefix = answer_prefix(task);
    const std::string_view lead = "The four secret numbers of ";
    const std::string key = prefix.substr(lead.size(), prefix.rfind(' ') - lead.size());
    for (const std::string& number : task.answers) {
      CHECK(occurrences(task.context, number) == 1);
      CHECK(occurrences(task.context, "A secret number of " + key + " is " + number + ".") == 1);
    }
  }
}

TEST_CASE("mk3 is a table of uuids in which key and value come once") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Task task = generate_task(TaskKind::mk3, seed, 8000);
    REQUIRE(task.answers.size() == 1);
    for (const std::string& line : lines_of(task.context)) {
      CHECK(line.size() == 76);
      CHECK(line.substr(36, 4) == " -> ");
    }
    CHECK(occurrences(task.context, task.answers[0]) == 1);
    CHECK(occurrences(task.context, answer_prefix(task) + " " + task.answers[0]) == 1);
  }
}

TEST_CASE("cwe has ten words that come most often") {
  for (const std::size_t bytes : {2048u, 4096u, 8192u, 65536u, 131072u}) {
    const Task task = generate_task(TaskKind::cwe, bytes, bytes);
    std::istringstream stream(task.context);
    std::map<std::string, std::size_t> counts;
    std::string number;
    std::string word;
    for (std::size_t i = 1; stream >> number >> word; ++i) {
      REQUIRE(number == std::to_string(i) + ".");
      ++counts[word];
    }
    const std::size_t times = std::min<std::size_t>(30, bytes / 280);
    REQUIRE(task.answers.size() == 10);
    for (const std::string& answer : task.answers) {
      REQUIRE(counts[answer] == times);
      counts.erase(answer);
    }
    CHECK(counts.size() > 10);
    for (const auto& entry : counts) CHECK(entry.second == 3);
  }
}

TEST_CASE("qa1 states the asked fact once") {
  std::set<std::string> questions;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Task task = generate_task(TaskKind::qa1, seed, 16000);
    REQUIRE(task.answers.size() == 1);
    CHECK(occurrences(task.context, answer_prefix(task) + " ") == 1);
    CHECK(occurrences(task.context, answer_prefix(task) + " " + task.answers[0] + ".") == 1);
    const std::vector<std::string> lives = lines_of(task.context);
    CHECK(lives.size() > 40);
    CHECK(occurrences(task.context, " was born in the town of ") == lives.size());
    CHECK(occurrences(task.context, " worked as a ") == lives.size());
    CHECK(occurrences(task.context, " died in the year ") == lives.size());
    questions.insert(task.question.substr(11, 8));
    if (starts_with(task.question, "\nQuestion: In which town")) {
      CHECK(occurrences(task.context, " " + task.answers[0] + ".") == 1);
    }
  }
  CHECK(questions.size() >= 2);
}

TEST_CASE("the score is the share of whole answers") {
  Task task;
  CHECK(task_score(task, "") == 1.0);
  task.answers = {"123"};
  CHECK(task_score(task, "") == 0.0);
  CHECK(task_score(task, "91234") == 0.0);
  CHECK(task_score(task, "1234") == 0.0);
  CHECK(task_score(task, "0123") == 0.0);
  CHECK(task_score(task, "123a") == 0.0);
  CHECK(task_score(task, "123") == 1.0);
  CHECK(task_score(task, " 123.") == 1.0);
  CHECK(task_score(task, "1234 and (123)") == 1.0);
  task.answers = {"Oldwick"};
  CHECK(task_score(task, "in OLDWICK's streets") == 1.0);
  CHECK(task_score(task, "Oldwickham") == 0.0);
  CHECK(task_score(task, "Oldwic") == 0.0);
  task.answers = {"11", "22", "33", "44"};
  CHECK(task_score(task, " 33, 11\nand 33") == 0.5);
  CHECK(task_score(task, "11223344") == 0.0);
  CHECK(task_score(task, "44 33 22 11") == 1.0);
}
