// Continuous batching without an engine: 200 requests come over time, share prompts, have several
// answers, verify drafts, are put aside when memory is short, and one is cancelled. Exits with 1
// unless all of that has happened and every answer is, bit for bit, that of its request run alone.
#include <chrono>

#include <fmt/format.h>

#include "server.hpp"

constexpr int kRequests = 200, kCancelled = 77, kPrefixes = 4;
constexpr std::int64_t kFastLimit = 1'600'000;

static verkv::CacheConfig settings() {
  verkv::CacheConfig config;
  config.layers.assign(kLayers, {kKvHeads, kHeads, kDim, kDim});
  config.keep = 1.0 / 8;
  config.local_tokens = 16;
  config.chunk_tokens = 32;
  config.threads = 1;
  return config;
}

static std::vector<Request> workload() {
  std::vector<Request> all;
  for (std::uint64_t id = 0; id < kRequests; ++id) {
    const auto number = [&](std::uint64_t what, int from, int to) {
      return from + static_cast<int>(chance(id, what, 0) * static_cast<float>(to - from));
    };
    Request request{.seed = id, .draw = id, .arrival = number(0, 0, 400)};
    if (id % 3 == 0) request.prefix = number(1, 0, kPrefixes);
    // Forks have one draw: who may share a prefix has that of the prefix from the start.
    if (request.prefix >= 0) request.draw = kRequests + static_cast<std::uint64_t>(request.prefix);
    request.prompt = number(2, 20, 300) + (request.prefix >= 0 ? kPrefix : 0);
    for (int i = 0; i < request.prompt; ++i) {
      const auto text = i < kPrefix && request.prefix >= 0 ? request.draw : id;
      request.tokens.push_back(
          static_cast<int>(chance(text, 3, static_cast<std::uint64_t>(i)) * kVocabulary));
    }
    request.end = request.prompt + number(4, 1, 120);
    if (id == kCancelled) request.end += 100, request.cancelled = request.prompt + 50;
    const Request first = request;
    if (id % 10 == 1)
      for (std::uint64_t sample = 1; sample <= 3; ++sample) {
        request.samples.push_back(first);
        request.samples.back().seed = id + 1000 * sample;
      }
    all.push_back(std::move(request));
  }
  std::ranges::stable_sort(all, {}, &Request::arrival);
  return all;
}

// What the server must reproduce: a request by itself, token by token.
static Answer alone(verkv::KvCacheManager& cache, const ToyModel& model, Request request) {
  request.sequence = cache.create_sequence(request.draw);
  while (!request.done()) {
    if (request.answering() && (request.cached - request.prompt) % kBlock == 0)
      cache.reserve(request.sequence, kBlock);
    const Row row{request.sequence, request.tokens[static_cast<std::size_t>(request.cached)],
                  request.cached};
    const Pass pass = model.run(cache, {&row, 1});
    if (request.answering()) {
      ++request.cached;
      extend(request, model, pass, 0);
    } else {
      note(request, pass, 0);
      if (request.cached < request.prompt) continue;
      compress(cache, request);
      extend(request, model, pass, 0);
    }
  }
  cache.erase(request.sequence);
  return {request.tokens, request.digest};
}

static void print(const Counts& c, const verkv::LayerStatistics& s, double alone, double served) {
  const auto kib = [](std::int64_t bytes) { return bytes / 1024; };
  fmt::print("answers   {} with {} tokens, {} of them wrong; {} request cancelled\n", c.answers,
             c.tokens, c.wrong, c.cancelled);
  fmt::print("steps     {}, {:.1f} rows each, at most {}\n", c.steps,
             static_cast<double>(c.rows) / static_cast<double>(c.steps), c.most_rows);
  fmt::print("drafts    {} accepted, {} rejected\n", c.accepted, c.rejected);
  fmt::print("forks     {} of shared prefixes, {} for further samples\n", c.prefixes, c.samples);
  fmt::print("put aside {} times, {} KiB saved; {} prompts read again\n", c.put_aside,
             kib(c.saved_bytes), c.read_again);
  fmt::print("memory    at most {} KiB fast (limit {}) and {} KiB host; all of it fast: {} KiB\n",
             kib(c.fast), kib(kFastLimit), kib(c.host), kib(c.dense));
  fmt::print("moved     {} of {} tokens that KV heads held, {:.2f} %\n", s.moved_tokens,
             s.cached_tokens,
             100 * static_cast<double>(s.moved_tokens) / static_cast<double>(s.cached_tokens));
  fmt::print("seconds   {:.2f}; {:.2f} one by one, without drafts\n", served, alone);
}

int main() {
  using Clock = std::chrono::steady_clock;
  const ToyModel model;
  const std::vector<Request> requests = workload();
  const auto start = Clock::now();
  std::map<std::uint64_t, Answer> expected;
  const auto by_itself = verkv::make_cpu_cache(settings());
  for (const Request& request : requests) {
    expected.emplace(request.seed, alone(*by_itself, model, request));
    for (const Request& sample : request.samples)
      expected.emplace(sample.seed, alone(*by_itself, model, sample));
  }
  const auto middle = Clock::now();
  verkv::CacheConfig config = settings();
  config.fast_bytes_limit = kFastLimit;
  const auto cache = verkv::make_cpu_cache(config);
  Server server(*cache, model, requests, expected);
  while (server.step()) {
  }
  const std::chrono::duration<double> one_by_one = middle - start, served = Clock::now() - middle;
  const Counts& c = server.counts;
  print(c, cache->statistics(), one_by_one.count(), served.count());
  const bool all_happened = c.answers + c.cancelled == std::ssize(expected) && c.cancelled == 1 &&
                            c.accepted > 0 && c.rejected > 0 && c.prefixes > 0 && c.samples > 0 &&
                            c.put_aside > 0 && cache->statistics().moved_tokens > 0;
  return c.wrong > 0 || !all_happened || cache->memory().host_bytes > 0;
}
