#include "tasks.hpp"

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include <verkv/error.hpp>

#include "text_random.hpp"
#include "texts.hpp"
#include "word_lists.hpp"

namespace verkv::lab {

namespace {

constexpr std::string_view kTaskNames[] = {"single", "mk1", "mk3", "mv", "cwe", "qa1"};

std::string two(TextRandom& random, Words first, std::string_view between, Words second) {
  std::string text(random.pick(first));
  text += between;
  return text += random.pick(second);
}

// Where a sentence can be put in: before another one outside of quotations, before a paragraph that
// is not the head or the foot of a letter or chapter, and at the end.
std::vector<std::size_t> sentence_starts(std::string_view text) {
  std::vector<std::size_t> starts;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') quoted = !quoted;
    if (quoted || i < 2) continue;
    const std::string_view before = text.substr(i - 2, 2);
    const std::string_view word = text.substr(i, text.find(' ', i) - i);
    const bool frame = word == "Chapter" || word == "Dear" || word == "Your";
    if (before == ". " || (before == "\n\n" && !frame)) starts.push_back(i);
  }
  starts.push_back(text.size());
  return starts;
}

// Prose of at most `bytes` bytes, with the space after its last sentence.
std::string prose_of(std::uint64_t seed, std::size_t bytes) {
  std::string text = prose_text(seed, bytes + 1);
  std::size_t cut = 0;
  for (const std::size_t start : sentence_starts(text)) {
    if (start <= bytes) cut = std::max(cut, start);
  }
  text.resize(cut);
  return text;
}

// Each needle at its own random depth. They are given with a space at the end.
std::string hide(TextRandom& random, std::string_view prose,
                 const std::vector<std::string>& needles) {
  const std::vector<std::size_t> starts = sentence_starts(prose);
  std::vector<std::pair<std::size_t, std::size_t>> places;
  for (std::size_t i = 0; i < needles.size(); ++i) {
    const std::size_t depth = random.below(prose.size() + 1);
    places.emplace_back(*std::lower_bound(starts.begin(), starts.end(), depth), i);
  }
  std::sort(places.begin(), places.end());
  std::string text;
  std::size_t done = 0;
  for (const auto& [place, needle] : places) {
    text += prose.substr(done, place - done);
    text += needles[needle];
    done = place;
  }
  text += prose.substr(done);
  while (text.back() == ' ' || text.back() == '\n') text.pop_back();
  return text;
}

Task number_task(TaskKind kind, std::uint64_t seed, std::size_t bytes) {
  const WordLists& words = shared_words();
  TextRandom random(seed, 11 + static_cast<std::uint64_t>(kind));
  const std::size_t count = kind == TaskKind::single ? 1 : 4;
  const bool one_key = kind == TaskKind::mv;
  std::vector<std::string> keys;
  std::vector<std::string> numbers;
  std::set<std::string> colors_and_animals;
  while (keys.size() < count) {
    // No two keys share a part, or a small model takes one for the other.
    const std::string color(random.pick(words["colors"]));
    const std::string animal(random.pick(words["animals"]));
    if (colors_and_animals.count(color) + colors_and_animals.count(animal) > 0) continue;
    colors_and_animals.insert({color, animal});
    keys.push_back(one_key && !keys.empty() ? keys.front() : color + "-" + animal);
  }
  while (numbers.size() < count) {
    const std::string number = std::to_string(random.between(1000000, 9999999));
    if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) {
      numbers.push_back(number);
    }
  }
  const std::string noun = one_key ? "A secret number of " : "The secret number of ";
  std::vector<std::string> needles;
  std::size_t needle_bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    needles.push_back(noun + keys[i] + " is " + numbers[i] + ". ");
    needle_bytes += needles.back().size();
  }
  Task task;
  task.context = hide(random, prose_of(seed, bytes - needle_bytes), needles);
  if (one_key) {
    task.question = "\nQuestion: What are the four secret numbers of " + keys[0] +
                    "?\nAnswer: The four secret numbers of " + keys[0] + " are";
    task.answers = numbers;
    task.max_new_tokens = 64;
  } else {
    const std::size_t asked = random.below(count);
    task.question = "\nQuestion: What is the secret number of " + keys[asked] +
                    "?\nAnswer: The secret number of " + keys[asked] + " is";
    task.answers = {numbers[asked]};
    task.max_new_tokens = 16;
  }
  return task;
}

Task uuid_task(std::uint64_t seed, std::size_t bytes) {
  TextRandom random(seed, 11 + static_cast<std::uint64_t>(TaskKind::mk3));
  std::vector<std::pair<std::string, std::string>> lines;
  Task task;
  while (true) {
    std::string key = random.uuid();
    std::string value = random.uuid();
    std::string line = key + " -> " + value + "\n";
    // The last newline is dropped.
    if (task.context.size() + line.size() > bytes + 1) break;
    task.context += line;
    lines.emplace_back(std::move(key), std::move(value));
  }
  task.context.pop_back();
  const auto& [key, value] = lines[random.below(lines.size())];
  task.question = "\nQuestion: Which value belongs to " + key + "?\nAnswer: " + key + " ->";
  task.answers = {value};
  task.max_new_tokens = 48;
  return task;
}

Task word_task(std::uint64_t seed, std::size_t bytes) {
  const WordLists& words = shared_words();
  TextRandom random(seed, 11 + static_cast<std::uint64_t>(TaskKind::cwe));
  constexpr std::size_t common = 10;
  constexpr std::size_t rare_times = 3;
  const Words list_words = words["list words"];
  std::vector<std::string> vocabulary(list_words.begin(), list_words.end());
  random.shuffle(vocabulary);
  // An entry takes some 14 bytes: in a short list every second one is a common word.
  const std::size_t common_times = std::min<std::size_t>(30, bytes / 280);

  std::vector<std::string> entries;
  std::size_t size = 0;
  // Whether the word still fits that often, and if so, adds it.
  const auto add = [&](const std::string& word, std::size_t times) {
    std::size_t grown = size;
    for (std::size_t i = 1; i <= times; ++i) {
      grown += std::to_string(entries.size() + i).size() + 3 + word.size();
    }
    // Without the space after the last entry.
    if (grown > bytes + 1) return false;
    size = grown;
    entries.insert(entries.end(), times, word);
    return true;
  };
  Task task;
  std::set<std::string> used;
  for (std::size_t i = 0; i < vocabulary.size(); ++i) {
    used.insert(vocabulary[i]);
    if (i < common) task.answers.push_back(vocabulary[i]);
    if (!add(vocabulary[i], i < common ? common_times : rare_times)) break;
  }
  // Where the words run out, two of them make a new one.
  while (true) {
    const std::string word = two(random, list_words, "", list_words);
    if (!used.insert(word).second) continue;
    if (!add(word, rare_times)) break;
  }
  random.shuffle(entries);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    task.context += std::to_string(i + 1) + ". " + entries[i] + " ";
  }
  task.context.pop_back();
  task.question =
      "\nQuestion: What are the ten most common words in the list above?\n"
      "Answer: The ten words that come most often in the list are";
  task.max_new_tokens = 100;
  return task;
}

struct Life {
  std::string who;
  std::string town;
  std::string trade;
  std::string year;
};

std::string told(TextRandom& random, const Life& life) {
  const WordLists& words = shared_words();
  std::string start(random.pick(words["life starts"]));
  start.replace(start.find("$who"), 4, life.who);
  std::vector<std::string> facts = {life.who + " was born in the town of " + life.town + ".",
                                    life.who + " worked as a " + life.trade + ".",
                                    life.who + " died in the year " + life.year + "."};
  random.shuffle(facts);
  // Not in one expression: the order of the two draws would be the compiler's.
  const int place = random.between(1, 3);
  facts.insert(facts.begin() + place, std::string(random.pick(words["life ends"])));
  for (const std::string& fact : facts) start += " " + fact;
  return start;
}

Task life_task(std::uint64_t seed, std::size_t bytes) {
  const WordLists& words = shared_words();
  TextRandom random(seed, 11 + static_cast<std::uint64_t>(TaskKind::qa1));
  std::vector<Life> lives;
  std::set<std::string> names;
  std::set<std::string> towns;
  Task task;
  while (true) {
    Life life;
    do {
      life.who = two(random, words["given names"], " ", words["families"]);
      // Middle names keep the names apart in a very long context.
      if (names.size() > words["given names"].size() * words["families"].size() / 2) {
        const std::size_t gap = life.who.find(' ');
        life.who.insert(gap, random.pick(words["given names"]));
        life.who.insert(gap, 1, ' ');
      }
    } while (!names.insert(life.who).second);
    // Towns come once as long as there are enough of them.
    do {
      life.town = two(random, words["town starts"], "", words["town ends"]);
    } while (towns.size() < words["town starts"].size() * words["town ends"].size() / 2 &&
             towns.count(life.town) > 0);
    towns.insert(life.town);
    life.trade = random.pick(words["trades"]);
    life.year = std::to_string(random.between(1700, 1949));
    const std::string paragraph = told(random, life);
    const std::size_t separator = lives.empty() ? 0 : 1;
    if (task.context.size() + separator + paragraph.size() > bytes) break;
    if (separator > 0) task.context += '\n';
    task.context += paragraph;
    lives.push_back(life);
  }
  const Life& life = lives[random.below(lives.size())];
  const std::size_t fact = random.below(3);
  if (fact == 0) {
    task.question = "\nQuestion: In which town was " + life.who + " born?\nAnswer: " + life.who +
                    " was born in the town of";
    task.answers = {life.town};
  } else if (fact == 1) {
    task.question =
        "\nQuestion: What was the work of " + life.who + "?\nAnswer: " + life.who + " worked as a";
    task.answers = {life.trade};
  } else {
    task.question = "\nQuestion: In which year did " + life.who + " die?\nAnswer: " + life.who +
                    " died in the year";
    task.answers = {life.year};
  }
  task.max_new_tokens = 16;
  return task;
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string lower(std::string_view text) {
  std::string result;
  for (const char c : text) result += lower(c);
  return result;
}

// text is in lower case.
bool contains(const std::string& text, const std::string& answer) {
  const auto part_of_word = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  for (std::size_t at = text.find(answer); at != std::string::npos;
       at = text.find(answer, at + 1)) {
    const std::size_t end = at + answer.size();
    if ((at == 0 || !part_of_word(text[at - 1])) &&
        (end == text.size() || !part_of_word(text[end]))) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::string_view name(TaskKind kind) { return kTaskNames[static_cast<std::size_t>(kind)]; }

std::optional<TaskKind> parse_task_kind(std::string_view text) {
  for (const TaskKind kind : {TaskKind::single, TaskKind::mk1, TaskKind::mk3, TaskKind::mv,
                              TaskKind::cwe, TaskKind::qa1}) {
    if (name(kind) == text) return kind;
  }
  return std::nullopt;
}

std::size_t minimum_context_bytes(TaskKind kind) {
  switch (kind) {
    case TaskKind::single:
    case TaskKind::mk3:
      return 512;
    case TaskKind::mk1:
    case TaskKind::mv:
    case TaskKind::qa1:
      return 1024;
    case TaskKind::cwe:
      break;
  }
  // Below this the common words would come fewer than 7 times.
  return 2048;
}

Task generate_task(TaskKind kind, std::uint64_t seed, std::size_t context_bytes) {
  if (context_bytes < minimum_context_bytes(kind)) {
    throw InvalidArgument("a context of " + std::to_string(context_bytes) + " bytes for " +
                          std::string(name(kind)) + ": at least " +
                          std::to_string(minimum_context_bytes(kind)) + " are needed");
  }
  if (context_bytes > kMaxContextBytes) {
    throw InvalidArgument("a context of " + std::to_string(context_bytes) + " bytes for " +
                          std::string(name(kind)) + ": at most " +
                          std::to_string(kMaxContextBytes) + " can be filled");
  }
  switch (kind) {
    case TaskKind::mk3:
      return uuid_task(seed, context_bytes);
    case TaskKind::cwe:
      return word_task(seed, context_bytes);
    case TaskKind::qa1:
      return life_task(seed, context_bytes);
    case TaskKind::single:
    case TaskKind::mk1:
    case TaskKind::mv:
      break;
  }
  return number_task(kind, seed, context_bytes);
}

double task_score(const Task& task, std::string_view generated) {
  if (task.answers.empty()) return 1;
  const std::string text = lower(generated);
  std::size_t found = 0;
  for (const std::string& answer : task.answers) found += contains(text, lower(answer));
  return static_cast<double>(found) / static_cast<double>(task.answers.size());
}

}  // namespace verkv::lab
