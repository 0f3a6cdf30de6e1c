// The generated prose: a chronicle of invented persons, things and towns. The world is kept as it
// changes, so that later sentences can speak of earlier events truly. The words and sentences are
// in data/prose.txt.
#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <verkv/error.hpp>

#include "text_random.hpp"
#include "texts.hpp"
#include "word_lists.hpp"

namespace verkv::lab {

namespace {

const WordLists& prose_lists() {
  static const WordLists lists(kProseData);
  return lists;
}

// What a person does, and what the world keeps of it.
enum class Effect { none, give_thing, take_thing, move, marry, quarrel, debt, repay };
constexpr std::array<std::pair<std::string_view, Effect>, 8> kEffects{
    {{"none", Effect::none},
     {"give_thing", Effect::give_thing},
     {"take_thing", Effect::take_thing},
     {"move", Effect::move},
     {"marry", Effect::marry},
     {"quarrel", Effect::quarrel},
     {"debt", Effect::debt},
     {"repay", Effect::repay}}};

struct Deed {
  Effect effect = Effect::none;
  std::string_view past;
  std::string_view participle;
};

Effect parse_effect(std::string_view word) {
  for (const auto& [name, effect] : kEffects) {
    if (name == word) return effect;
  }
  throw InvalidArgument("a deed has no effect \"" + std::string(word) + "\"");
}

const std::vector<Deed>& deeds() {
  static const std::vector<Deed> all = [] {
    std::vector<Deed> read;
    for (const std::string_view line : prose_lists()["deeds"]) {
      const std::vector<std::string_view> parts = fields(line);
      read.push_back({parse_effect(parts.at(0)), parts.at(1), parts.at(2)});
    }
    return read;
  }();
  return all;
}

std::string capitalized(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') {
    text[0] = static_cast<char>(text[0] - 'a' + 'A');
  }
  return text;
}

class Prose {
 public:
  explicit Prose(std::uint64_t seed) : lists_(prose_lists()), random_(seed, 1), deck_(random_) {
    year_ = random_.between(1690, 1830);
    season_ = random_.below(4);
    while (people_.size() < 8) add_person();
    live_before();
  }

  // With the empty line after it.
  std::string paragraph() {
    std::string text;
    if (paragraphs_left_ == 0) text = start_chapter();
    --paragraphs_left_;
    cast();
    if (!fresh_.empty() && random_.percent(45)) {
      a_ = fresh_.back();
      fresh_.pop_back();
      recast_others();
      text += portrait();
    } else {
      const int kind = random_.between(0, 99);
      if (kind < 46) {
        text += narrative();
      } else if (kind < 72) {
        text += dialogue();
      } else if (kind < 82) {
        text += letter();
      } else if (kind < 90) {
        text += sentences(lists_["town sentences"], random_.between(3, 6));
      } else {
        text += annals();
      }
    }
    if (text.back() == ' ') text.pop_back();
    return text + "\n\n";
  }

 private:
  struct Kin {
    std::string_view relation;
    std::size_t other;
  };
  struct Person {
    std::string given;
    std::string family;
    bool female = false;
    std::string_view trade;
    std::string_view look;
    std::string_view habit;
    std::size_t town = 0;
    int born = 0;
    bool married = false;
    std::vector<Kin> kin;
  };
  struct Thing {
    std::string text;
    std::size_t owner;
  };
  struct Event {
    std::string text;
    std::size_t actor;
    std::size_t other;
    int year;
    std::size_t season;
  };

  void add_person() {
    Person person;
    person.female = random_.percent(50);
    person.given = deck_.draw(person.female ? lists_["women"] : lists_["men"]);
    person.family = deck_.draw(lists_["families"]);
    person.trade = deck_.draw(lists_["trade"]);
    person.look = deck_.draw(lists_["look"]);
    person.habit = deck_.draw(lists_["habit"]);
    person.town = random_.below(lists_["towns"].size());
    person.born = year_ - random_.between(19, 61);
    const std::size_t self = people_.size();
    if (self > 0 && random_.percent(60)) {
      const std::size_t other = random_.below(self);
      Person& relative = people_[other];
      if (random_.percent(45)) {
        person.family = relative.family;
        person.born = relative.born + random_.between(2, 7);
        person.kin.push_back({relative.female ? "sister" : "brother", other});
        relative.kin.push_back({person.female ? "sister" : "brother", self});
      } else if (year_ - relative.born > 40) {
        person.born = relative.born + random_.between(20, 24);
        person.kin.push_back({relative.female ? "aunt" : "uncle", other});
        relative.kin.push_back({person.female ? "niece" : "nephew", self});
      } else {
        person.kin.push_back({"cousin", other});
        relative.kin.push_back({"cousin", self});
      }
    }
    people_.push_back(person);
    std::string thing = "the " + std::string(random_.pick(lists_["materials"]));
    thing += " " + std::string(deck_.draw(lists_["things"]));
    things_.push_back({thing, self});
    fresh_.push_back(self);
  }

  // Gives the first chapter something to look back to.
  void live_before() {
    for (int i = 0; i < 16; ++i) {
      pass_time();
      choose_regulars();
      cast();
      deed();
    }
  }

  void pass_time() {
    const std::size_t seasons = season_ + 1 + random_.below(4);
    year_ += static_cast<int>(seasons / 4);
    season_ = seasons % 4;
  }

  std::string start_chapter() {
    ++chapter_;
    if (chapter_ > 1) {
      pass_time();
      for (int i = random_.between(0, 2); i > 0; --i) add_person();
    }
    paragraphs_left_ = random_.between(6, 15);
    choose_regulars();
    cast();
    return "Chapter " + std::to_string(chapter_) + ": " +
           capitalized(one_of(lists_["chapter titles"])) + "\n\n";
  }

  void choose_regulars() {
    regulars_.clear();
    while (regulars_.size() < 4) {
      const std::size_t person = random_.below(people_.size());
      if (std::find(regulars_.begin(), regulars_.end(), person) == regulars_.end()) {
        regulars_.push_back(person);
      }
    }
    town_ = people_[regulars_[0]].town;
  }

  void cast() {
    a_ = regulars_[random_.below(regulars_.size())];
    recast_others();
    town_ = random_.percent(75) ? town_ : random_.below(lists_["towns"].size());
    // A thing that one of them owns, most of the time.
    thing_ = random_.below(things_.size());
    for (std::size_t i = 0; i < things_.size() && random_.percent(96); ++i) {
      if (things_[i].owner == a_ || things_[i].owner == b_) thing_ = i;
    }
  }
  void recast_others() {
    do {
      b_ = regulars_[random_.below(regulars_.size())];
    } while (b_ == a_);
    do {
      c_ = random_.below(people_.size());
    } while (c_ == a_ || c_ == b_);
  }

  std::string sentence(Words templates) { return capitalized(one_of(templates)) + " "; }
  // One sentence speaks of one event.
  std::string one_of(Words templates) {
    if (!events_.empty()) recalled_ = recall();
    subject_.clear();
    std::string text = expand(deck_.draw(templates));
    for (std::size_t i = 2; i < text.size(); ++i) {
      const bool article = text[i - 1] == ' ' && (text[i - 2] == 'a' || text[i - 2] == 'A') &&
                           (i == 2 || text[i - 3] == ' ' || text[i - 3] == '"');
      if (article && std::string_view("aeiou").find(text[i]) < 5) text.insert(i - 1, "n");
    }
    return text;
  }
  std::string sentences(Words templates, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += sentence(templates);
    return text;
  }

  std::string memory() {
    if (events_.empty()) return sentence(lists_["thing memories"]);
    return random_.percent(70) ? sentence(lists_["memories"]) : sentence(lists_["thing memories"]);
  }

  std::string narrative() {
    std::string text = sentence(lists_["openings"]);
    const int length = random_.between(2, 7);
    const int deed_at = random_.between(0, length);
    for (int i = 0; i <= length; ++i) {
      if (i == deed_at) {
        text += deed();
      } else if (random_.percent(22)) {
        text += memory();
      } else {
        text += random_.percent(40) ? sentence(lists_["joins"]) : sentence(lists_["fillers"]);
      }
    }
    if (random_.percent(60)) text += sentence(lists_["closings"]);
    return text;
  }

  // Only what is possible now, so that later sentences can rely on it.
  bool possible(Effect effect) const {
    const auto indebted = [&](std::size_t debtor, std::size_t creditor) {
      return std::find(debts_.begin(), debts_.end(), std::pair(debtor, creditor)) != debts_.end();
    };
    switch (effect) {
      case Effect::give_thing:
        return things_[thing_].owner == a_;
      case Effect::take_thing:
        return things_[thing_].owner != a_;
      case Effect::move:
        return people_[a_].town != town_;
      case Effect::marry:
        return !people_[a_].married && !people_[b_].married &&
               people_[a_].female != people_[b_].female &&
               people_[a_].family != people_[b_].family &&
               std::none_of(people_[a_].kin.begin(), people_[a_].kin.end(),
                            [&](const Kin& kin) { return kin.other == b_; });
      case Effect::debt:
        return !indebted(a_, b_);
      case Effect::repay:
        return indebted(a_, b_);
      case Effect::quarrel:
      case Effect::none:
        break;
    }
    return true;
  }

  std::string deed() {
    const Deed* deed = nullptr;
    do {
      deed = &deck_.draw(std::span<const Deed>(deeds()));
    } while (!possible(deed->effect));
    // What is remembered must name the same task or subject.
    fixed_.clear();
    fixing_ = true;
    deed_ = expand(deed->past);
    const std::string memory = people_[a_].given + " had " + expand(deed->participle);
    fixing_ = false;
    const std::string text = sentence(lists_["deed frames"]);
    events_.push_back({memory, a_, b_, year_, season_});
    switch (deed->effect) {
      case Effect::give_thing:
        things_[thing_].owner = b_;
        break;
      case Effect::take_thing:
        things_[thing_].owner = a_;
        break;
      case Effect::move:
        people_[a_].town = town_;
        break;
      case Effect::marry:
        people_[a_].married = people_[b_].married = true;
        people_[a_].kin.push_back({people_[b_].female ? "wife" : "husband", b_});
        people_[b_].kin.push_back({people_[a_].female ? "wife" : "husband", a_});
        break;
      case Effect::debt:
        debts_.emplace_back(a_, b_);
        break;
      case Effect::repay:
        debts_.erase(std::find(debts_.begin(), debts_.end(), std::pair(a_, b_)));
        break;
      case Effect::quarrel:
      case Effect::none:
        break;
    }
    return text;
  }

  std::string quote(Words words, std::size_t speaker, std::string_view end) {
    std::string text = "\"" + capitalized(one_of(words));
    const int form = random_.between(0, 9);
    if (form < 5) {
      text += std::string(end == "." ? "," : end) + "\" ";
      text += end == "?" ? "asked" : std::string(random_.pick(lists_["speaking"]));
      text += " " + people_[speaker].given;
      if (form < 2) text += " " + expand("{manner}");
      return text + ". ";
    }
    return text + std::string(end) + "\" ";
  }

  std::string dialogue() {
    std::string text;
    if (random_.percent(50)) text += sentence(lists_["openings"]);
    const int turns = random_.between(2, 5);
    for (int i = 0; i < turns; ++i) {
      const bool asks = random_.percent(65);
      text += quote(asks ? lists_["questions"] : lists_["statements"], i % 2 == 0 ? a_ : b_,
                    asks ? "?" : ".");
      text += "\n\n";
      text += quote(lists_["answers"], i % 2 == 0 ? b_ : a_, ".");
      if (random_.percent(30)) text += sentence(lists_["beats"]);
      if (i + 1 < turns) text += "\n\n";
    }
    if (random_.percent(40)) text += sentence(lists_["closings"]);
    for (std::size_t at = text.find(" \n"); at != std::string::npos; at = text.find(" \n")) {
      text.erase(at, 1);
    }
    return text;
  }

  std::string letter() {
    std::string text = std::string(lists_["towns"][people_[a_].town]) + ", in the " +
                       std::string(lists_["seasons"][season_]) + " of " + std::to_string(year_) +
                       ".\n\n";
    text += "Dear " + people_[b_].given + ",\n\n";
    text += sentence(lists_["letter openings"]);
    text += sentences(lists_["letter bodies"], random_.between(2, 5));
    text.pop_back();
    return text + "\n\nYour " + signature() + ",\n" + people_[a_].given + " " + people_[a_].family;
  }
  std::string signature() const {
    for (const Kin& kin : people_[b_].kin) {
      if (kin.other == a_) return std::string(kin.relation);
    }
    return "friend";
  }

  std::string annals() {
    std::string text = "The register of " + std::string(lists_["towns"][town_]) + " for " +
                       std::to_string(year_) + " ";
    if (events_.size() < 4) return text + "is lost. " + sentences(lists_["town sentences"], 2);
    text += "is short. ";
    // In the order in which things happened.
    std::size_t at = random_.below(events_.size() - 3);
    for (int i = random_.between(2, 4); i > 0 && at < events_.size(); --i) {
      text += "It says that " + events_[at].text + " " + when(events_[at]) + ". ";
      if (random_.percent(50)) text += sentence(lists_["joins"]);
      at += 1 + random_.below(3);
    }
    return text;
  }

  std::string portrait() {
    std::string text = sentence(lists_["portraits"].first(1));
    std::vector<std::size_t> rest;
    for (std::size_t i = 1; i < lists_["portraits"].size(); ++i) rest.push_back(i);
    random_.shuffle(rest);
    rest.resize(static_cast<std::size_t>(random_.between(2, 5)));
    for (const std::size_t i : rest) text += sentence(lists_["portraits"].subspan(i, 1));
    return text;
  }

  std::string when(const Event& event) const {
    const std::string season(lists_["seasons"][event.season]);
    if (event.year == year_)
      return event.season == season_ ? "that very " + season : "in the " + season;
    if (event.year == year_ - 1) return "in the " + season + " of the year before";
    return "in the " + season + " of " + std::to_string(event.year);
  }

  // One that concerns those who are present, if there is one, and not always the newest.
  const Event& recall() {
    std::vector<std::size_t> known;
    for (std::size_t i = 0; i < events_.size(); ++i) {
      const Event& event = events_[i];
      if (event.actor == a_ || event.actor == b_ || event.other == a_) known.push_back(i);
    }
    if (known.empty() || random_.percent(25)) return events_[random_.below(events_.size())];
    return events_[known[random_.below(known.size())]];
  }

  std::string kin_of(std::size_t self) {
    Person& person = people_[self];
    if (person.kin.empty()) {
      std::size_t other = 0;
      do {
        other = random_.below(people_.size());
      } while (other == self);
      person.kin.push_back({random_.percent(50) ? "neighbour" : "partner", other});
    }
    const Kin& kin = person.kin[random_.below(person.kin.size())];
    return std::string(person.female ? "her " : "his ") + std::string(kin.relation) + " " +
           people_[kin.other].given;
  }

  std::string of_person(std::size_t self, std::string_view form) {
    const Person& person = people_[self];
    if (form.empty()) return person.given;
    if (form == "full") return person.given + " " + person.family;
    if (form == "trade") return std::string(person.trade);
    if (form == "town") return std::string(lists_["towns"][person.town]);
    if (form == "born") return std::to_string(person.born);
    if (form == "look") return std::string(person.look);
    if (form == "habit") return expand(person.habit);
    if (form == "kin") return kin_of(self);
    if (form == "he") return person.female ? "she" : "he";
    if (form == "He") return person.female ? "She" : "He";
    if (form == "him") return person.female ? "her" : "him";
    if (form == "his") return person.female ? "her" : "his";
    return person.female ? "Her" : "His";
  }

  std::string value(std::string_view key) {
    const std::string_view form = key.size() > 2 && key[1] == '.' ? key.substr(2) : "";
    if (key[0] == 'A') return of_person(a_, form);
    if (key[0] == 'B') return of_person(b_, form);
    if (key[0] == 'C') return of_person(c_, form);
    if (key == "T") return std::string(lists_["towns"][town_]);
    if (key == "T.river") return std::string(lists_["rivers"][town_ % lists_["rivers"].size()]);
    if (key == "T.mark") {
      return std::string(
          lists_["landmarks"][(town_ * 7 + random_.below(3)) % lists_["landmarks"].size()]);
    }
    if (key == "O") return things_[thing_].text;
    if (key == "Thing") return capitalized(things_[thing_].text);
    if (key == "owner") return people_[things_[thing_].owner].given;
    if (key == "mine") {
      for (const Thing& thing : things_) {
        if (thing.owner == a_) return "a certain" + thing.text.substr(3);
      }
      return "a good name";
    }
    if (key == "M") {
      return events_.empty() ? "the bridge had fallen" : recalled_.text;
    }
    if (key == "when") return recalled_.text.empty() ? "long ago" : when(recalled_);
    if (key == "deed") return deed_;
    if (key == "season") return std::string(lists_["seasons"][season_]);
    if (key == "Season") return capitalized(std::string(lists_["seasons"][season_]));
    if (key == "year") return std::to_string(year_);
    if (key == "clause") {
      // The subject of both clauses is named once.
      std::string clause(deck_.draw(lists_["clauses"]));
      const std::string subject = clause.substr(0, 4);
      if (subject == subject_ && (subject == "{A} " || subject == "{B} ")) clause.insert(2, ".he");
      subject_ = subject;
      return expand(clause);
    }
    return expand(deck_.draw(lists_[key]));
  }

  std::string expand(std::string_view pattern) {
    std::string text;
    while (true) {
      const std::size_t open = pattern.find('{');
      text += pattern.substr(0, open);
      if (open == std::string_view::npos) return text;
      const std::size_t close = pattern.find('}', open);
      const std::string key(pattern.substr(open + 1, close - open - 1));
      pattern.remove_prefix(close + 1);
      if (!fixing_) {
        text += value(key);
        continue;
      }
      const auto known = fixed_.find(key);
      text += known != fixed_.end() ? known->second : fixed_[key] = value(key);
    }
  }

  const WordLists& lists_;
  TextRandom random_;
  Deck deck_;
  std::vector<Person> people_;
  std::vector<Thing> things_;
  std::vector<Event> events_;
  std::vector<std::pair<std::size_t, std::size_t>> debts_;
  std::vector<std::size_t> fresh_;
  std::vector<std::size_t> regulars_;
  std::map<std::string, std::string> fixed_;
  bool fixing_ = false;
  std::string deed_;
  std::string subject_;
  Event recalled_{};
  std::size_t a_ = 0;
  std::size_t b_ = 0;
  std::size_t c_ = 0;
  std::size_t town_ = 0;
  std::size_t thing_ = 0;
  std::size_t season_ = 0;
  int year_ = 0;
  int chapter_ = 0;
  int paragraphs_left_ = 0;
};

}  // namespace

std::string prose_text(std::uint64_t seed, std::size_t bytes) {
  std::string text;
  text.reserve(bytes + 1024);
  Prose prose(seed);
  while (text.size() < bytes) text += prose.paragraph();
  return text;
}

}  // namespace verkv::lab
