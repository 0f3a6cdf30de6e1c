// KvCacheManager on a backend (support/test_backend.hpp): what an error says to a program, its code
// and its place.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "catch.hpp"
#include "reference/statistics.hpp"
#include "support/victim.hpp"

using namespace verkv;
using namespace verkv::test;
using verkv::reference::Random;

namespace {

std::string shown(const ErrorPlace& place) {
  return "layer " + std::to_string(place.layer) + ", row " + std::to_string(place.row) + ", head " +
         std::to_string(place.head) + ", token " + std::to_string(place.token);
}

// One call that goes wrong, and what its error has to say.
template <class Kind>
void refuses(const std::string& what, const std::function<void()>& call, ErrorCode code,
             const ErrorPlace& place) {
  INFO(what);
  try {
    call();
    FAIL_CHECK("no error");
  } catch (const Kind& error) {
    INFO(error.what());
    CHECK(std::string(name(error.code())) == name(code));
    CHECK(shown(error.place()) == shown(place));
    const Error& base = error;
    CHECK(base.code() == error.code());
  }
}

}  // namespace

TEST_CASE("Misuse has a code and a place") {
  const Victim victim(victim_config());
  KvCacheManager& cache = *victim.cache;
  Random random(51);
  const Block keys = random_block(random, 3, 2, 64, 1);
  const Block values = random_block(random, 3, 2, 48, 1);
  const Block queries = random_block(random, 2, 6, 64, 1);
  const Scores scores = random_scores(random, 2, 80, ScoreKind::random);
  const SequenceId stranger{99};
  const auto append = [&](SequenceId id, std::int64_t layer, const Block& k, const Block& v) {
    return [&cache, id, layer, k, v] { cache.append(id, layer, k.view(), v.view()); };
  };
  const auto append_batch = [&](std::int64_t layer, std::vector<SequenceId> ids, const Block& k,
                                const Block& v) {
    return [&cache, layer, ids, k, v] { cache.append(layer, {ids, k.view(), v.view()}); };
  };
  const auto step = [&](std::int64_t layer, std::vector<SequenceId> ids, const Block& q) {
    return [&cache, layer, ids, q] {
      std::vector<float> output(ids.size() * 6 * 48);
      AttendBatch batch;
      batch.sequences = ids;
      batch.queries = q.view();
      batch.output = output;
      cache.attend(layer, batch);
    };
  };
  const auto spoilt = [](Block block, std::int64_t token, std::int64_t head, float number) {
    block.at(token, head, 5) = number;
    return block;
  };
  const auto compress = [&](const std::vector<Scores>& of, std::vector<TensorView> prompt = {}) {
    return [&cache, &victim, of, prompt] {
      std::vector<ImportanceView> views;
      for (const Scores& s : of) views.push_back(s.view());
      cache.compress(victim.b, views, prompt);
    };
  };
  Scores bad_score = scores;
  bad_score.data[size(80 + 7)] = -1;
  const Block narrow = random_block(random, 3, 2, 63, 1);
  const Block prompt = random_block(random, 4, 6, 64, 1);
  const Block three = random_block(random, 3, 6, 64, 1);
  const Block bad_prompt = spoilt(prompt, 3, 5, kInfinity);

  struct Case {
    std::string what;
    std::function<void()> call;
    ErrorCode code;
    ErrorPlace place;
  };
  const SequenceId a = victim.a;
  const SequenceId b = victim.b;
  const std::vector<Case> cases{
      {"append: sequence", append(stranger, 2, keys, values), ErrorCode::unknown_sequence, {2}},
      {"append: layer", append(a, 3, keys, values), ErrorCode::unknown_layer, {3}},
      {"append: not cached", append(a, 1, keys, values), ErrorCode::unknown_layer, {1}},
      {"append: shape", append(a, 0, narrow, values), ErrorCode::shape, {0}},
      {"append: tokens", append(a, 2, keys.part(0, 2), values), ErrorCode::shape, {2}},
      {"append: key",
       append(a, 2, spoilt(keys, 2, 1, kNaN), values),
       ErrorCode::number,
       {2, -1, 1, 2}},
      {"append: value",
       append(b, 0, keys, spoilt(values, 1, 0, kInfinity)),
       ErrorCode::number,
       {0, -1, 0, 1}},
      {"batch: sequence",
       append_batch(0, {a, b, stranger}, keys, values),
       ErrorCode::unknown_sequence,
       {0, 2}},
      {"batch: layer", append_batch(1, {a, b, b}, keys, values), ErrorCode::unknown_layer, {1}},
      {"batch: again", append_batch(2, {a, b, a}, keys, values), ErrorCode::repeated, {2, 2}},
      {"batch: rows", append_batch(2, {a, b}, keys, values), ErrorCode::shape, {2}},
      {"batch: key",
       append_batch(2, {a, b, b}, spoilt(keys, 2, 1, kNaN), values),
       ErrorCode::number,
       {2, 2, 1, 2}},
      {"batch: value",
       append_batch(0, {kNoSequence, b, b}, keys, spoilt(values, 1, 0, kNaN)),
       ErrorCode::number,
       {0, 1, 0, 1}},
      {"reserve: sequence", [&] { cache.reserve(stranger, 4); }, ErrorCode::unknown_sequence, {}},
      {"reserve: tokens", [&] { cache.reserve(a, -1); }, ErrorCode::shape, {}},
      {"truncate: sequence", [&] { cache.truncate(stranger, 4); }, ErrorCode::unknown_sequence, {}},
      {"truncate: tokens", [&] { cache.truncate(a, 81); }, ErrorCode::shape, {}},
      {"attend: sequence", step(0, {b, stranger}, queries), ErrorCode::unknown_sequence, {0, 1}},
      {"attend: layer", step(-7, {b, a}, queries), ErrorCode::unknown_layer, {-7}},
      {"attend: torn", step(2, {b, a, b}, three), ErrorCode::repeated, {2, 2}},
      {"attend: rows", step(2, {b}, queries), ErrorCode::shape, {2}},
      {"attend: query", step(2, {b, a}, spoilt(queries, 1, 4, kNaN)), ErrorCode::number, {2, 1, 4}},
      {"compress: layers", compress({scores, scores}), ErrorCode::shape, {}},
      {"compress: shape", compress({scores, {}, {}}), ErrorCode::shape, {2}},
      {"compress: score", compress({scores, {}, bad_score}), ErrorCode::number, {2, -1, 1, 7}},
      {"compress: prompt layers",
       compress({scores, {}, scores}, {prompt.view()}),
       ErrorCode::shape,
       {}},
      {"compress: prompt shape",
       compress({scores, {}, scores}, {prompt.view(), {}, narrow.view()}),
       ErrorCode::shape,
       {2}},
      {"compress: prompt query",
       compress({scores, {}, scores}, {prompt.view(), {}, bad_prompt.view()}),
       ErrorCode::number,
       {2, -1, 5, 3}},
      {"erase", [&] { cache.erase(stranger); }, ErrorCode::unknown_sequence, {}},
      {"redraw", [&] { cache.redraw(stranger, 1); }, ErrorCode::unknown_sequence, {}},
      {"memory", [&] { cache.memory(stranger); }, ErrorCode::unknown_sequence, {}},
      {"tokens: sequence", [&] { cache.tokens(stranger, 0); }, ErrorCode::unknown_sequence, {0}},
      {"tokens: layer", [&] { cache.tokens(a, 5); }, ErrorCode::unknown_layer, {5}},
      {"compressed", [&] { cache.compressed_tokens(a, 1); }, ErrorCode::unknown_layer, {1}},
      {"statistics", [&] { cache.statistics(3); }, ErrorCode::unknown_layer, {3}},
      {"read: layer", [&] { cache.read(a, 1, 0, 0, {}, {}); }, ErrorCode::unknown_layer, {1}},
      {"read: tokens", [&] { cache.read(a, 2, 0, 81, {}, {}); }, ErrorCode::shape, {2}},
      {"changed row", [&] { cache.changed_row(a, 5); }, ErrorCode::unknown_layer, {5}}};
  for (const Case& c : cases) refuses<InvalidArgument>(c.what, c.call, c.code, c.place);
  victim.check_unchanged();
}

TEST_CASE("Limits have a code and a place") {
  Random random(52);
  for (const bool host : {true, false}) {
    CacheConfig config = victim_config();
    (host ? config.host_bytes_limit : config.fast_bytes_limit) = 200'000;
    const auto cache = make_cache(config);
    const SequenceId id = cache->create_sequence();
    const Block keys = random_block(random, 1000, 2, 64, 1);
    const Block values = random_block(random, 1000, 2, 48, 1);
    refuses<CapacityError>("bytes", [&] { cache->append(id, 2, keys.view(), values.view()); },
                           host ? ErrorCode::host_limit : ErrorCode::fast_limit, {2});
  }
  const auto cache = make_cache(victim_config());
  const SequenceId id = cache->create_sequence();
  TensorView many = token_major(&random, DType::f32, std::int64_t{1} << 32, 2, 64);
  TensorView values = many;
  values.dim = 48;
  refuses<CapacityError>("tokens", [&] { cache->append(id, 0, many, values); },
                         ErrorCode::token_limit, {0});
}

TEST_CASE("Settings have a code") {
  CacheConfig config = victim_config();
  config.keep = 2;
  refuses<InvalidArgument>("keep", [&] { make_cache(config); }, ErrorCode::setting, {});
  refuses<InvalidArgument>("share",
                           [&] { keep_for_fast_share(2, config.layers[0], DType::f16, {}); },
                           ErrorCode::setting, {});
}

TEST_CASE("A place is filled in where it is open, and survives copies") {
  InvalidArgument error("text", ErrorCode::number, {.layer = -1, .row = 4, .head = -1, .token = 0});
  error.add_place({.layer = 2, .row = 3, .head = -1, .token = 9});
  const Error copy = error;
  CHECK(shown(copy.place()) == shown({2, 4, -1, 0}));
  CHECK(copy.code() == ErrorCode::number);
  CHECK(Error("text").code() == ErrorCode::other);
  CHECK(Error("text").place() == ErrorPlace{});
  CHECK(FormatError("text").code() == ErrorCode::format);
  // Names are the enumerators', each once.
  std::vector<std::string> names;
  for (int code = 0; code <= static_cast<int>(ErrorCode::being_compressed); ++code)
    names.emplace_back(name(static_cast<ErrorCode>(code)));
  std::sort(names.begin(), names.end());
  CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
  CHECK(names.front() != "?");
}
