// A server's loop: who runs, which rows a step has, and what becomes of them. main.cpp makes requests
// and judges answers; toy_model.hpp stands for the model.
#ifndef VERKV_SERVING_LOOP_SERVER_HPP
#define VERKV_SERVING_LOOP_SERVER_HPP

#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <stdexcept>
#include <utility>

#include "toy_model.hpp"

inline constexpr int kPrefix = 96;      // tokens of a shared prefix
inline constexpr int kPromptRows = 64;  // of prompts, in a step
inline constexpr int kBlock = 32;       // tokens of an answer for which room is reserved at once
inline constexpr int kDrafts = 4;       // most in a step of a sequence

// A prompt that is to be answered, and how far that is.
struct Request {
  std::uint64_t seed = 0, draw = 0;   // of the answer's tokens, and of the cache's sample
  int arrival = 0;                    // step
  int prefix = -1;                    // which shared prefix the prompt begins with
  int prompt = 0, end = 0;            // tokens of the prompt, and of both when all is done
  int cancelled = 0;                  // tokens after which the user goes away; 0: stays
  std::vector<int> tokens = {};       // the prompt, then the answer
  std::vector<Request> samples = {};  // more answers to the same prompt

  verkv::SequenceId sequence = verkv::kNoSequence;
  int cached = 0;                                         // tokens that the cache has
  int room = 0;                                           // tokens for which room is still reserved
  std::array<Floats, kLayers> queries = {}, scores = {};  // of a prompt that is being read
  std::vector<std::byte> saved = {};                      // while it is put aside
  std::uint64_t digest = 0;                               // of all bits that the answer rests on

  bool answering() const { return std::ssize(tokens) > prompt; }
  bool done() const { return std::ssize(tokens) == end; }
};

struct Answer {
  std::vector<int> tokens;
  std::uint64_t digest;
  friend bool operator==(const Answer&, const Answer&) = default;
};

struct Counts {
  std::int64_t steps = 0, rows = 0, most_rows = 0;
  std::int64_t answers = 0, wrong = 0, cancelled = 0, tokens = 0, accepted = 0, rejected = 0;
  std::int64_t prefixes = 0, samples = 0, put_aside = 0, saved_bytes = 0, read_again = 0;
  std::int64_t fast = 0, host = 0, dense = 0;  // most bytes; what a plain cache of all would take
};

// The prompt is in the cache: keeps a sample of it on the fast tier.
inline void compress(verkv::KvCacheManager& cache, Request& request) {
  std::vector<verkv::ImportanceView> importance;
  std::vector<verkv::TensorView> queries;
  std::array<Floats, kLayers> by_head;
  for (std::size_t l = 0; l < kLayers; ++l) {
    for (std::size_t head = 0; head < kKvHeads; ++head)
      for (std::size_t i = head; i < request.scores[l].size(); i += kKvHeads)
        by_head[l].push_back(request.scores[l][i]);
    importance.push_back({by_head[l].data(), kKvHeads, request.prompt, request.prompt});
    queries.push_back(ToyModel::view(request.queries[l], kHeads));
  }
  cache.compress(request.sequence, importance, queries);
  request.queries = request.scores = {};
}

// Row `row` of a pass belongs to the prompt: what compressing it will need.
inline void note(Request& request, const Pass& pass, std::size_t row) {
  for (std::size_t l = 0; l < kLayers; ++l) {
    const auto queries = pass.queries[l].begin() + static_cast<int>(row * kQuery);
    const auto scores = pass.scores[l].begin() + static_cast<int>(row * kKvHeads);
    request.queries[l].insert(request.queries[l].end(), queries, queries + kQuery);
    request.scores[l].insert(request.scores[l].end(), scores, scores + kKvHeads);
  }
  ++request.cached;
}

// Row `row` is the last token that the answer has: adds the next one, and says which it is.
inline int extend(Request& request, const ToyModel& model, const Pass& pass, std::size_t row) {
  const std::span hidden(&pass.hidden[row * kWidth], kWidth);
  for (const float x : hidden) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    request.digest = (request.digest ^ bits) * 0x100000001B3;
  }
  const int token = model.next(hidden, request.seed, static_cast<int>(request.tokens.size()));
  request.tokens.push_back(token);
  return token;
}

class Server {
 public:
  // `expected` by seed: what answers are compared with, and what the draft model mostly guesses.
  Server(verkv::KvCacheManager& cache, const ToyModel& model, std::vector<Request> requests,
         const std::map<std::uint64_t, Answer>& expected)
      : cache_(cache), model_(model), expected_(expected) {
    std::ranges::move(requests, std::back_inserter(coming_));
  }

  // One step of all that run. False when nothing is left to do.
  bool step() {
    cancel();
    make_room();
    admit();
    std::vector<Row> rows;
    std::vector<std::size_t> first;  // row of each running request
    int prompt_rows = kPromptRows;
    for (const Request& request : running_) {
      first.push_back(rows.size());
      if (request.answering())
        add_drafts(request, rows);
      else
        prompt_rows -= add_prompt(request, prompt_rows, rows);
    }
    first.push_back(rows.size());
    if (!rows.empty()) take(model_.run(cache_, rows), rows, first);
    count(static_cast<int>(rows.size()));
    const bool more = !running_.empty() || !waiting_.empty() || !coming_.empty();
    while (!more && !prefixes_.empty()) drop_prefix();
    return more;
  }

  Counts counts;

 private:
  // ---- Who runs

  // Room for the next block of each answer that has come to the end of one: only there a chunk of
  // the cache is compressed, however many drafts were taken. Who came last makes way.
  void make_room() {
    for (std::size_t i = 0; i < running_.size(); ++i) {
      while (i < running_.size() && running_[i].answering() && running_[i].room == 0) {
        try {
          cache_.reserve(running_[i].sequence, kBlock);
          running_[i].room = kBlock;
        } catch (const verkv::CapacityError&) {
          std::size_t last = running_.size() - 1;
          while (!running_[last].answering() || running_[last].room > 0) --last;
          put_aside(last);
        }
      }
    }
  }

  void put_aside(std::size_t i) {
    Request& request = running_[i];
    cache_.save(request.sequence, [&](std::span<const std::byte> bytes) {
      request.saved.insert(request.saved.end(), bytes.begin(), bytes.end());
    });
    cache_.erase(std::exchange(request.sequence, verkv::kNoSequence));
    ++counts.put_aside;
    counts.saved_bytes += std::ssize(request.saved);
    waiting_.push_front(std::move(request));
    running_.erase(running_.begin() + static_cast<int>(i));
  }

  // In order of arrival; who was put aside comes first.
  void admit() {
    for (; !coming_.empty() && coming_.front().arrival <= counts.steps; coming_.pop_front())
      waiting_.push_back(std::move(coming_.front()));
    while (!waiting_.empty() && enter(waiting_.front())) {
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    if (!running_.empty() || waiting_.empty()) return;
    if (prefixes_.empty()) throw std::runtime_error("the limit is too small for one request");
    drop_prefix();
  }

  void drop_prefix() {
    cache_.erase(prefixes_.begin()->second.sequence);
    prefixes_.erase(prefixes_.begin());
  }

  // False, and nothing has changed, where memory is short.
  bool enter(Request& request) {
    Request next = request;
    try {
      const auto shared = prefixes_.find(request.prefix);
      if (!request.saved.empty()) {
        next.sequence = cache_.restore(reader(request.saved));
        next.saved.clear();
      } else if (shared != prefixes_.end()) {
        next.sequence = cache_.fork(shared->second.sequence);
        next.cached = kPrefix;
        next.queries = shared->second.queries;
        next.scores = shared->second.scores;
      } else {
        next.sequence = cache_.create_sequence(request.draw);
      }
      next.room = request.answering() ? kBlock : request.prompt - next.cached;
      cache_.reserve(next.sequence, next.room);
    } catch (const verkv::CapacityError&) {
      if (next.sequence != verkv::kNoSequence) cache_.erase(next.sequence);
      return false;
    }
    if (!running_.empty() && !can_compress(request)) {
      cache_.erase(next.sequence);
      return false;
    }
    counts.prefixes += next.cached == kPrefix && !next.answering();
    request = std::move(next);
    return true;
  }

  // Whether there is room now for what compressing its prompt takes beside the rows. Answers that grow
  // meanwhile may still take it.
  bool can_compress(const Request& request) const {
    if (request.answering()) return true;
    const verkv::SequenceBytes bytes = verkv::sequence_bytes(cache_.config(), request.prompt);
    return cache_.memory().fast_held_bytes() + bytes.most_fast_bytes -
               bytes.appended.fast_held_bytes() <=
           *cache_.config().fast_bytes_limit;
  }

  static verkv::ReadBytes reader(std::span<const std::byte> saved) {
    return [saved](std::span<std::byte> to) mutable {
      const std::size_t size = std::min(saved.size(), to.size());
      std::ranges::copy(saved.first(size), to.begin());
      saved = saved.subspan(size);
      return size;
    };
  }

  void cancel() {
    std::erase_if(running_, [&](const Request& request) {
      const bool gone = request.cancelled > 0 && std::ssize(request.tokens) >= request.cancelled;
      if (gone) cache_.erase(request.sequence);
      counts.cancelled += gone;
      return gone;
    });
  }

  // ---- The rows of a step

  // The next piece of a prompt; returns its rows. The first to read a shared prefix stops there.
  int add_prompt(const Request& request, int most, std::vector<Row>& rows) {
    const int until = leads(request) ? kPrefix : request.prompt;
    const int count = std::min(until - request.cached, most);
    for (int i = request.cached; i < request.cached + count; ++i)
      rows.push_back({request.sequence, request.tokens[static_cast<std::size_t>(i)], i});
    return count;
  }

  bool leads(const Request& request) const {
    return request.prefix >= 0 && request.cached < kPrefix && !prefixes_.contains(request.prefix);
  }

  // The last token of an answer, and drafts of those that may follow: a draft model is right four
  // times out of five. No draft crosses the end of a block.
  void add_drafts(const Request& request, std::vector<Row>& rows) {
    rows.push_back({request.sequence, request.tokens.back(), request.cached});
    const Answer& answer = expected_.at(request.seed);
    const auto at = static_cast<std::uint64_t>(request.cached);
    const int drafts = std::min({static_cast<int>(chance(request.seed, at, 5) * (kDrafts + 1)),
                                 request.room - 1, request.end - request.cached - 2});
    for (int i = 1; i <= drafts; ++i) {
      const int guess = answer.tokens[static_cast<std::size_t>(request.cached + i)];
      const bool right = chance(request.seed, at + static_cast<std::uint64_t>(i), 6) < 0.8f;
      rows.push_back(
          {request.sequence, right ? guess : (guess + 1) % kVocabulary, request.cached + i});
    }
  }

  // ---- What a step has brought

  void take(const Pass& pass, std::span<const Row> rows, std::span<const std::size_t> first) {
    std::vector<Request> samples;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      Request& request = running_[i];
      if (request.answering()) {
        verify(request, pass, rows.first(first[i + 1]), first[i]);
        continue;
      }
      const bool led = leads(request);
      for (std::size_t row = first[i]; row < first[i + 1]; ++row) note(request, pass, row);
      if (led && request.cached == kPrefix) share(request);
      if (request.cached == request.prompt) begin_answer(request, pass, first[i + 1] - 1, samples);
    }
    std::ranges::move(samples, std::back_inserter(running_));
    std::erase_if(running_, [&](const Request& request) {
      if (request.done()) finish(request);
      return request.done() || request.sequence == verkv::kNoSequence;
    });
  }

  // Goes on with the model's own token where a draft is not it.
  void verify(Request& request, const Pass& pass, std::span<const Row> rows, std::size_t row) {
    const auto drafts = static_cast<int>(rows.size() - row) - 1;
    int accepted = 0;
    while (true) {
      const int token = extend(request, model_, pass, row++);
      if (row == rows.size() || rows[row].token != token) break;
      ++accepted;
    }
    request.cached += 1 + accepted;
    request.room -= 1 + accepted;
    if (accepted < drafts && !cache_.truncate(request.sequence, request.cached))
      throw std::logic_error("drafts are in the local window");
    counts.accepted += accepted;
    counts.rejected += drafts - accepted;
  }

  // Keeps the prefix that the request has just read, for others, where memory allows: for the fork, and
  // for the page that the request shares from now on.
  void share(const Request& request) {
    verkv::SequenceId fork = verkv::kNoSequence;
    try {
      fork = cache_.fork(request.sequence);
      cache_.reserve(fork, 0);
      cache_.reserve(request.sequence, request.prompt - request.cached);
    } catch (const verkv::CapacityError&) {
      if (fork != verkv::kNoSequence) cache_.erase(fork);
      return;
    }
    Request& prefix = prefixes_[request.prefix] = request;
    prefix.sequence = fork;
  }

  // The prompt has been read, `row` is its last; where there is no room to compress it, it is read
  // again when there is. Each sample goes on from a fork, or comes again as a request of its own where
  // there is no room for one.
  void begin_answer(Request& request, const Pass& pass, std::size_t row,
                    std::vector<Request>& samples) {
    try {
      compress(cache_, request);
    } catch (const verkv::CapacityError&) {  // it wants room beside the prompt's rows
      read_again(request);
      return;
    }
    request.room = 0;
    for (Request& sample : request.samples) {
      try {
        sample.sequence = cache_.fork(request.sequence);
        sample.cached = sample.prompt;
        extend(sample, model_, pass, row);
        samples.push_back(std::move(sample));
        ++counts.samples;
      } catch (const verkv::CapacityError&) {
        waiting_.push_back(std::move(sample));
      }
    }
    request.samples.clear();
    extend(request, model_, pass, row);
  }

  // Leaves the request, without a sequence, to be dropped.
  void read_again(Request& request) {
    cache_.erase(std::exchange(request.sequence, verkv::kNoSequence));
    request.queries = request.scores = {};
    request.cached = request.room = 0;
    waiting_.push_front(request);
    ++counts.read_again;
    if (!prefixes_.empty())
      drop_prefix();
    else if (running_.size() == 1)
      throw std::runtime_error("the limit is too small for one request");
  }

  void finish(const Request& request) {
    counts.wrong += Answer{request.tokens, request.digest} != expected_.at(request.seed);
    ++counts.answers;
    counts.tokens += request.end - request.prompt;
    cache_.erase(request.sequence);
  }

  void count(int rows) {
    ++counts.steps;
    counts.rows += rows;
    counts.most_rows = std::max<std::int64_t>(counts.most_rows, rows);
    const verkv::MemoryReport memory = cache_.memory();
    counts.fast = std::max(counts.fast, memory.fast_held_bytes());
    counts.host = std::max(counts.host, memory.host_bytes);
    std::int64_t dense = 0;
    for (const Request& request : running_)
      dense += request.cached * kLayers * kKvHeads * kDim * 2 * 2;  // key and value, f16
    counts.dense = std::max(counts.dense, dense);
  }

  verkv::KvCacheManager& cache_;
  const ToyModel& model_;
  const std::map<std::uint64_t, Answer>& expected_;
  std::deque<Request> coming_;   // in order of arrival
  std::deque<Request> waiting_;  // has arrived, or was put aside
  std::vector<Request> running_;
  std::map<int, Request> prefixes_;
};

#endif  // VERKV_SERVING_LOOP_SERVER_HPP
