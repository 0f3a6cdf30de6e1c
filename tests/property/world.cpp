#include "property/world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <sstream>
#include <utility>

#include "support/allocations.hpp"
#include "tolerance.hpp"

namespace verkv::test {
namespace {

// By a writer or a reader.
struct Thrown {};

template <class T>
T pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[random.below(from.size())];
}

std::int64_t all_bytes(const MemoryReport& r) {
  return r.fast_bytes() + r.host_bytes + r.basis_bytes + r.reserved_bytes;
}

// Small heads, several layers of different shapes, everything else of all that there is.
CacheConfig draw_config(Random& random) {
  CacheConfig config;
  config.layers = {
      {.kv_heads = 2, .query_heads = 4, .key_dim = 8, .value_dim = 4},
      {.kv_heads = 1, .query_heads = 2, .key_dim = 4, .value_dim = 4, .dense = true},
      {.kv_heads = 1, .query_heads = 1, .key_dim = 8, .value_dim = 8, .cached = false},
      {.kv_heads = 2, .query_heads = 2, .key_dim = 12, .value_dim = 3, .soft_cap = 20.0},
  };
  if (random.below(2) == 0) {
    config.layers[1].window = 1 + static_cast<std::int64_t>(random.below(40));
    config.window_margin = static_cast<std::int64_t>(random.below(12));
  }
  if (random.below(3) == 0) {
    for (const std::size_t layer : {0, 1, 3}) {
      for (std::int64_t h = 0; h < config.layers[layer].query_heads; ++h)
        config.layers[layer].sink_logits.push_back(static_cast<float>(2 * random.normal()));
    }
  }
  config.storage = pick(random, {DType::f32, DType::f16, DType::bf16});
  config.keep = pick(random, {0.1, 0.25, 0.5, 0.9, 1.0});
  config.fetch.mode = pick(random, {FetchMode::verified, FetchMode::verified, FetchMode::verified,
                                    FetchMode::never, FetchMode::always});
  if (random.below(3) == 0) config.fetch.epsilon.reset();
  if (random.below(3) == 0) config.fetch.risk.reset();
  if (random.below(8) == 0) config.fetch.limit_tokens = 3;
  config.local_tokens = pick<std::int64_t>(random, {0, 1, 4, 9});
  config.sink_tokens = pick<std::int64_t>(random, {0, 1, 4});
  config.chunk_tokens = pick<std::int64_t>(random, {1, 4, 8, 16});
  if (random.below(6) == 0) config.chunk_tokens.reset();
  config.chunks_in_turn = random.below(3) == 0;
  if (random.below(3) > 0) config.compress_from = 0;
  config.pool = pick(random, {Pool::head, Pool::head, Pool::head, Pool::layer, Pool::sequence});
  config.sketch.kind = pick(random, {SketchKind::calibrated, SketchKind::exact});
  config.sketch.bits = pick(random, {2, 3, 4});
  config.seed = random.bits();
  config.threads = random.below(8) == 0 ? 2 : 1;
  config.study.select =
      pick(random, {Selection::spread, Selection::spread, Selection::poisson, Selection::topk});
  config.study.estimator =
      pick(random, {Estimator::clusters, Estimator::clusters, Estimator::plain});
  if (random.below(5) == 0) config.study.cap.reset();
  if (random.below(4) == 0) config.fast_bytes_limit = 80'000 + 80'000 * random.below(2);
  if (random.below(8) == 0) config.host_bytes_limit = 60'000;
  config.host = pick(random, {HostTier::own, HostTier::own, HostTier::own, HostTier::engine,
                              HostTier::engine, HostTier::file});
  if (config.host == HostTier::file) config.host_directory = ".";
  if (config.host == HostTier::engine) config.layers[1].window.reset();
  return config;
}

}  // namespace

const std::vector<World::Operation> World::kOperations = {
    {"create", 3, &World::create},
    {"append", 12, &World::append},
    {"append batch", 10, &World::append_batch},
    {"reserve", 4, &World::reserve},
    {"compress", 6, &World::compress},
    {"attend", 18, &World::attend},
    {"step", 18, &World::step},
    {"truncate", 4, &World::truncate},
    {"draft", 10, &World::draft},
    {"erase", 2, &World::erase},
    {"redraw", 3, &World::redraw},
    {"fork", 4, &World::fork},
    {"move", 3, &World::move},
    {"save and restore", 6, &World::save_and_restore},
    {"read", 2, &World::read},
    {"misuse", 10, &World::misuse},
};

World::World(std::uint64_t seed, Tallies& tallies, std::ostream* trace)
    : tallies_(tallies), trace_(trace) {
  Random random(seed);
  config_ = draw_config(random);
  // Long enough for several pages of rows, now and then of a sketch.
  most_tokens_ = random.below(10) == 0 ? 700 : 160;
  spread_ = pick(random, {0.5, 1.0, 2.0});
  for (std::size_t l = 0; l < config_.layers.size(); ++l) {
    if (config_.layers[l].cached) cached_.push_back(static_cast<std::int64_t>(l));
  }
  if (config_.host == HostTier::engine) {
    for (const LayerConfig& layer : config_.layers)
      engine_.push_back(std::make_unique<EngineCells>(layer, config_.storage, random));
  }
  twins_ = std::make_unique<TwinCache>(config_);
  CacheConfig counted = config_;
  counted.fast_allocator = fast_.allocator();
  counted.host_allocator = host_.allocator();
  cache_ = make_cpu_cache(counted);
  steps_.assign(config_.layers.size(), 0);
}

std::string World::configuration() const {
  const CacheConfig& c = config_;
  const auto shown = [](const auto& x) {
    std::ostringstream text;
    if (x) text << *x;
    return x ? text.str() : std::string("off");
  };
  std::ostringstream text;
  text << verkv::name(c.storage) << ", keep " << c.keep << ", mode "
       << static_cast<int>(c.fetch.mode) << ", epsilon " << shown(c.fetch.epsilon) << ", risk "
       << shown(c.fetch.risk) << ", limit " << shown(c.fetch.limit_tokens) << ", local "
       << c.local_tokens << ", sinks " << c.sink_tokens << ", chunk " << shown(c.chunk_tokens)
       << (c.chunks_in_turn ? " in turn" : "") << ", compress from " << shown(c.compress_from)
       << ", pool " << static_cast<int>(c.pool) << ", sketch " << static_cast<int>(c.sketch.kind)
       << "/" << c.sketch.bits << ", select " << static_cast<int>(c.study.select) << ", estimator "
       << static_cast<int>(c.study.estimator) << ", cap " << shown(c.study.cap) << ", threads "
       << shown(c.threads) << ", fast limit " << shown(c.fast_bytes_limit) << ", host tier "
       << static_cast<int>(c.host) << ", limit " << shown(c.host_bytes_limit) << ", window "
       << shown(c.layers[1].window) << " and " << c.window_margin << ", sink logits "
       << !c.layers[0].sink_logits.empty() << ", at most " << most_tokens_ << " tokens";
  return text.str();
}

template <class... Parts>
void World::say(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text_ += " " + text.str();
  if (trace_ != nullptr) *trace_ << " " << text.str() << std::flush;
}

template <class... Parts>
void World::violated(const Parts&... parts) const {
  std::ostringstream text;
  (text << ... << parts);
  throw Violation(text.str());
}

void World::operate(std::uint64_t seed) {
  random_ = Random(seed);
  int all = 0;
  for (const Operation& one : kOperations) all += one.weight;
  int at = static_cast<int>(random_.below(static_cast<std::size_t>(all)));
  std::size_t i = 0;
  while (at >= kOperations[i].weight) at -= kOperations[i++].weight;
  if (members_.empty()) i = 0;
  name_ = kOperations[i].name;
  text_.clear();
  say(name_);
  (this->*kOperations[i].run)();
  check_state();
}

// Runs a call that is right, or wrong (then it must be refused as misuse). One in some is short of
// memory on the way. false: it was refused, and must have changed nothing.
template <class Call>
bool World::attempt(Call&& call, bool wrong) {
  const bool limits = config_.fast_bytes_limit || config_.host_bytes_limit;
  const bool is_short = random_.below(10) == 0;
  allowed =
      is_short ? static_cast<std::int64_t>(random_.below(random_.below(2) == 0 ? 4 : 60)) : -1;
  std::string text;
  try {
    call();
    allowed = -1;
    if (wrong) violated("misuse was not refused");
    ++tallies_.done[name_];
    return true;
  } catch (const Violation&) {
    allowed = -1;
    throw;
  } catch (const verkv::InvalidArgument& error) {
    allowed = -1;
    if (!wrong) violated("refused as misuse: ", error.what());
  } catch (const verkv::CapacityError& error) {
    allowed = -1;
    if (!limits) violated("no limit is set: ", error.what());
  } catch (const std::bad_alloc&) {
    allowed = -1;
    if (!is_short) violated("out of memory, of which there was enough");
    ++tallies_.out_of_memory;
  } catch (const verkv::FormatError& error) {
    allowed = -1;
    if (!wrong) violated("refused as damaged: ", error.what());
  } catch (const Thrown&) {
    // By the test itself.
    allowed = -1;
  } catch (const std::exception& error) {
    allowed = -1;
    violated("another exception: ", error.what());
  }
  say("(refused)");
  ++tallies_.refused[name_];
  return false;
}

World::Rows World::draw_rows(std::int64_t layer, std::int64_t tokens) {
  const LayerConfig& l = config_.layers[size(layer)];
  Rows rows{constant_block(tokens, l.kv_heads, l.key_dim, 0),
            constant_block(tokens, l.kv_heads, l.value_dim, 0)};
  for (float& x : rows.keys.data) x = static_cast<float>(spread_ * random_.normal());
  for (float& x : rows.values.data) x = static_cast<float>(random_.uniform(-1, 1));
  return rows;
}

Block World::draw_queries(std::int64_t layer, std::int64_t rows) {
  const LayerConfig& l = config_.layers[size(layer)];
  Block block = constant_block(rows, l.query_heads, l.key_dim, 0);
  for (float& x : block.data) x = static_cast<float>(spread_ * random_.normal());
  return block;
}

World::Member& World::any() { return *members_[random_.below(members_.size())]; }

std::vector<std::int64_t> World::some_layers() {
  if (random_.below(6) > 0) return cached_;
  return {cached_[random_.below(cached_.size())]};
}

bool World::has_room(const Member& member, std::int64_t tokens) const {
  return std::all_of(member.layers.begin(), member.layers.end(), [&](const DenseLayer& layer) {
    return layer.tokens() + tokens <= most_tokens_;
  });
}

// Whether an append of so many tokens may compress a part of the window.
bool World::may_compress(const Member& member, std::int64_t layer, std::int64_t tokens) const {
  if (!config_.chunk_tokens || config_.keep >= 1 || config_.layers[size(layer)].window)
    return false;
  const std::int64_t window =
      cache_->tokens(member.id, layer) - cache_->compressed_tokens(member.id, layer);
  return window + tokens >= config_.local_tokens + *config_.chunk_tokens;
}

World::Given World::give(std::int64_t layer, const Rows& rows,
                         std::span<const SequenceId> sequences) {
  if (engine_.empty()) return {rows.keys.view(), rows.values.view(), nullptr};
  auto placed = engine_[size(layer)]->place(rows.keys, rows.values, sequences, random_);
  const TensorView keys = placed->keys;
  const TensorView values = placed->values;
  return {keys, values, std::move(placed)};
}

void World::appended(Member& member, std::int64_t layer, const Rows& rows, const Given& given,
                     std::int64_t first, std::int64_t count) {
  const Block keys = rows.keys.part(first, count);
  const Block values = rows.values.part(first, count);
  if (given.placed) {
    const auto from = given.placed->rows.begin() + first;
    auto& cells = member.cells[size(layer)];
    cells.insert(cells.end(), from, from + count);
  }
  member.layers[size(layer)].append(keys, values);
  const std::int64_t before = member.twin->compressed_tokens(layer);
  member.twin->append(layer, keys, values);
  tallies_.chunks += member.twin->compressed_tokens(layer) > before;
  if (keys.tokens > 0) member.ahead[size(layer)] = false;
}

void World::create() {
  if (members_.size() >= 5) return;
  auto member = std::make_unique<Member>();
  const std::uint64_t draw = random_.bits();
  for (const LayerConfig& layer : config_.layers)
    member->layers.emplace_back(layer, config_.storage);
  member->ahead.assign(config_.layers.size(), false);
  member->cells.resize(config_.layers.size());
  member->name = "s" + std::to_string(created_);
  if (!attempt([&] { member->id = cache_->create_sequence(draw); })) return;
  member->family = created_++;
  say(member->name);
  member->twin = std::make_unique<Twin>(*twins_, draw);
  members_.push_back(std::move(member));
}

void World::append() {
  Member& member = any();
  const std::int64_t tokens =
      static_cast<std::int64_t>(random_.below(random_.below(2) == 0 ? 41 : 4));
  if (!has_room(member, tokens)) return;
  say(member.name, " tokens ", tokens, " layers");
  for (const std::int64_t layer : some_layers()) {
    const Rows rows = draw_rows(layer, tokens);
    const Given given = give(layer, rows);
    say(layer);
    if (!attempt([&] { cache_->append(member.id, layer, given.keys, given.values); })) break;
    appended(member, layer, rows, given, 0, tokens);
  }
}

std::vector<World::Run> World::draw_runs(std::int64_t layer, std::int64_t most, bool appends) {
  std::vector<Member*> order;
  for (const auto& member : members_) order.push_back(member.get());
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
  order.resize(1 + random_.below(order.size()));
  std::vector<Run> runs;
  const auto pad = [&] {
    if (random_.below(4) > 0) return;
    const std::size_t rows = random_.below(6) == 0 ? 30 : 1 + random_.below(3);
    runs.push_back({nullptr, static_cast<std::int64_t>(rows)});
  };
  for (Member* member : order) {
    pad();
    std::int64_t rows = 1;
    if (random_.below(3) == 0) rows += static_cast<std::int64_t>(random_.below(size(most)));
    std::int64_t window =
        cache_->tokens(member->id, layer) - cache_->compressed_tokens(member->id, layer);
    // What others attend to may have left.
    if (config_.layers[size(layer)].window) window = 1;
    if (!appends) rows = std::max<std::int64_t>(1, std::min(rows, window));
    if (appends ? has_room(*member, rows) : !member->ahead[size(layer)])
      runs.push_back({member, rows});
  }
  pad();
  return runs;
}

namespace {

template <class Runs>
std::vector<SequenceId> rows_of(const Runs& runs) {
  std::vector<SequenceId> rows;
  for (const auto& run : runs)
    rows.insert(rows.end(), size(run.rows), run.member == nullptr ? kNoSequence : run.member->id);
  return rows;
}

template <class Runs>
std::string text_of(const Runs& runs) {
  std::ostringstream text;
  for (const auto& run : runs)
    text << (run.member == nullptr ? "-" : run.member->name) << "*" << run.rows << " ";
  return text.str();
}

}  // namespace

void World::append_batch() {
  const std::vector<std::int64_t> layers = some_layers();
  const std::vector<Run> runs = draw_runs(layers.front(), 6, true);
  const std::vector<SequenceId> sequences = rows_of(runs);
  say(text_of(runs), "layers");
  for (const std::int64_t layer : layers) {
    const Rows rows = draw_rows(layer, static_cast<std::int64_t>(sequences.size()));
    const Given given = give(layer, rows, sequences);
    say(layer);
    if (!attempt([&] { cache_->append(layer, {sequences, given.keys, given.values}); })) break;
    std::int64_t first = 0;
    for (const Run& run : runs) {
      if (run.member != nullptr) appended(*run.member, layer, rows, given, first, run.rows);
      first += run.rows;
    }
  }
}

void World::reserve() {
  Member& member = any();
  const std::int64_t tokens = static_cast<std::int64_t>(random_.below(24));
  if (!has_room(member, tokens)) return;
  say(member.name, " tokens ", tokens);
  if (attempt([&] { cache_->reserve(member.id, tokens); })) {
    member.twin->reserve(tokens);
    member.reserved = true;
  }
}

std::vector<Scores> World::draw_scores(const Member& member) {
  std::vector<Scores> scores(config_.layers.size());
  const ScoreKind kind = pick(random_, {ScoreKind::random, ScoreKind::random, ScoreKind::equal,
                                        ScoreKind::zero, ScoreKind::with_zeros});
  for (const std::int64_t layer : cached_) {
    const std::int64_t open =
        cache_->tokens(member.id, layer) - cache_->compressed_tokens(member.id, layer);
    scores[size(layer)] = random_scores(random_, config_.layers[size(layer)].kv_heads, open, kind);
  }
  return scores;
}

void World::compress() {
  Member& member = any();
  const std::vector<Scores> scores = draw_scores(member);
  std::vector<Block> queries;
  if (random_.below(2) == 0) {
    for (std::size_t l = 0; l < config_.layers.size(); ++l)
      queries.push_back(
          draw_queries(static_cast<std::int64_t>(l), static_cast<std::int64_t>(random_.below(5))));
  }
  std::vector<ImportanceView> importance;
  for (const Scores& one : scores) importance.push_back(one.view());
  std::vector<TensorView> prompt;
  for (const Block& one : queries) prompt.push_back(one.view());
  // Of a reservation and of a limit slices make something else.
  const bool in_slices = !config_.fast_bytes_limit && !config_.host_bytes_limit &&
                         !member.reserved && random_.below(2) == 0;
  const std::int64_t heads = 1 + static_cast<std::int64_t>(random_.below(5));
  say(member.name, in_slices ? " in slices" : "");
  const auto call = [&] {
    if (!in_slices) return cache_->compress(member.id, importance, prompt);
    std::int64_t left = cache_->begin_compress(member.id, importance, prompt);
    while (left > 0) {
      try {
        left = cache_->continue_compress(member.id, heads);
      } catch (const std::bad_alloc&) {
        allowed = -1;  // it goes on where it was
      }
    }
  };
  if (attempt(call)) {
    member.twin->compress(scores, queries);
    member.reserved = false;
  }
}

void World::attend() {
  const std::int64_t layer = cached_[random_.below(cached_.size())];
  const std::vector<Run> runs = draw_runs(layer, 4, false);
  say("layer ", layer, " ", text_of(runs));
  ask(layer, runs, nullptr);
}

void World::step() {
  const std::vector<std::int64_t> layers = some_layers();
  const std::vector<Run> runs = draw_runs(layers.front(), 4, true);
  say(text_of(runs), "layers");
  for (const std::int64_t layer : layers) {
    std::int64_t all = 0;
    for (const Run& run : runs) all += run.rows;
    const Rows rows = draw_rows(layer, all);
    say(layer);
    if (!ask(layer, runs, &rows)) break;
  }
}

bool World::ask(std::int64_t layer, const std::vector<Run>& runs, const Rows* rows) {
  const LayerConfig& l = config_.layers[size(layer)];
  const std::vector<SequenceId> sequences = rows_of(runs);
  const std::size_t count = sequences.size();
  Block queries = draw_queries(layer, static_cast<std::int64_t>(count));
  const bool has_status = random_.below(3) == 0;
  if (has_status && count > 0 && random_.below(3) == 0) {
    // In every head, since the twin asks one by one.
    const std::int64_t bad = static_cast<std::int64_t>(random_.below(count));
    for (std::int64_t h = 0; h < l.query_heads; ++h) queries.at(bad, h, 1) = kNaN;
  }
  const bool has_reports = random_.below(6) > 0;
  Result result;
  result.output.assign(count * size(l.query_heads * l.value_dim), kNaN);
  result.lse.assign(count * size(l.query_heads), kNaN);
  if (has_reports) result.query.resize(count * size(l.query_heads));
  if (has_reports) result.kv.resize(count * size(l.kv_heads));
  std::vector<RowStatus> status(has_status ? count : 0);
  const AttendBatch batch{sequences,    queries.view(), result.output, result.lse,
                          result.query, result.kv,      status};
  Given given;
  if (rows != nullptr) given = give(layer, *rows, sequences);
  const bool done = attempt([&] {
    if (rows == nullptr) {
      cache_->attend(layer, batch);
    } else {
      cache_->step(layer, given.keys, given.values, batch);
    }
  });
  if (!done) return false;
  std::int64_t first = 0;
  for (const Run& run : runs) {
    if (run.member != nullptr && rows != nullptr)
      appended(*run.member, layer, *rows, given, first, run.rows);
    compare(layer, run, first, result, queries, has_reports);
    first += run.rows;
  }
  return true;
}

namespace {

bool is_finite(const Block& block, std::int64_t row) {
  const auto begin = block.data.begin() + row * block.heads * block.dim;
  return std::all_of(begin, begin + block.heads * block.dim,
                     [](float x) { return std::isfinite(x); });
}

bool same_error(const std::vector<QueryHeadReport>& a, const std::vector<QueryHeadReport>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.output_error == y.output_error; });
}

}  // namespace

void World::compare(std::int64_t layer, const Run& run, std::int64_t first, const Result& all,
                    const Block& queries, bool has_reports) {
  const LayerConfig& l = config_.layers[size(layer)];
  const auto cut = [&](const auto& from, std::int64_t each) {
    const auto begin = from.begin() + (from.empty() ? 0 : first * each);
    return std::decay_t<decltype(from)>(begin, begin + (from.empty() ? 0 : run.rows * each));
  };
  Result got{cut(all.output, l.query_heads * l.value_dim), cut(all.lse, l.query_heads),
             cut(all.query, l.query_heads), cut(all.kv, l.kv_heads)};
  if (run.member == nullptr) {
    for (const float x : got.output) {
      if (x != 0) violated("layer ", layer, ": padding has the output ", x);
    }
    for (const float x : got.lse) {
      if (x != -kInfinity) violated("layer ", layer, ": padding has the LSE ", x);
    }
    return;
  }
  const Member& member = *run.member;
  const Block asked = queries.part(first, run.rows);
  const Result alone = member.twin->attend(layer, asked);
  if (!same_bits(got.output, alone.output) || !same_bits(got.lse, alone.lse))
    violated(member.name, ", layer ", layer, ": answers differ from those of the sequence alone");
  if (has_reports && !(same_all(got.query, alone.query) && same_all(got.kv, alone.kv) &&
                       same_error(got.query, alone.query))) {
    violated(member.name, ", layer ", layer, ": reports differ from those of the sequence alone");
  }
  const DenseLayer& held = member.layers[size(layer)];
  const std::int64_t compressed = cache_->compressed_tokens(member.id, layer);
  for (std::int64_t r = 0; r < run.rows; ++r) {
    if (!is_finite(asked, r)) continue;
    ++steps_[size(layer)];
    const std::int64_t tokens = std::max<std::int64_t>(0, held.tokens() - (run.rows - 1 - r));
    const Result row = row_of(alone, size(r), size(run.rows));
    for (std::int64_t h = 0; h < l.query_heads; ++h) {
      check_answer(layer,
                   held.answer(tokens, asked.data.data() + (r * l.query_heads + h) * l.key_dim, h),
                   tokens, compressed, h, row);
    }
    check_reports(layer, tokens, row);
  }
}

void World::check_answer(std::int64_t layer, const DenseAnswer& dense, std::int64_t tokens,
                         std::int64_t compressed, std::int64_t head, const Result& row) {
  const QueryHeadReport& report = row.query[size(head)];
  const double lse = static_cast<double>(row.lse[size(head)]);
  const bool always = config_.fetch.mode == FetchMode::always && !config_.fetch.limit_tokens;
  if ((compressed == 0 || always) && report.epsilon != 0)
    violated("layer ", layer, ": epsilon is ", report.epsilon, " where all tokens are at hand");
  if (!(report.epsilon >= 0)) violated("layer ", layer, ": epsilon is ", report.epsilon);
  if (report.certified && !(config_.fetch.epsilon && report.epsilon <= *config_.fetch.epsilon)) {
    violated("layer ", layer, ": certified with epsilon ", report.epsilon);
  }
  if (report.epsilon == 0) {
    ++tallies_.exact_answers;
    if (tokens == 0) {
      if (lse != dense.lse) violated("layer ", layer, ": LSE ", lse, " of no token");
      return;
    }
    const double near = tolerance::kStepLse + tolerance::kStepLseShare * dense.largest_logit;
    if (!(std::fabs(lse - dense.lse) <= near))
      violated("layer ", layer, ", head ", head, ": exact, but the LSE is ", lse, ", not ",
               dense.lse);
    const std::size_t dim = dense.output.size();
    for (std::size_t j = 0; j < dim; ++j) {
      const double x = static_cast<double>(row.output[size(head) * dim + j]);
      if (!(std::fabs(x - dense.output[j]) <= tolerance::kStepOutput))
        violated("layer ", layer, ", head ", head, ": exact, but the output is ", x, ", not ",
                 dense.output[j]);
    }
    return;
  }
  ++tallies_.estimated_answers;
  if (!report.certified || config_.sketch.kind != SketchKind::exact ||
      config_.study.select == Selection::topk) {
    return;
  }
  ++tallies_.certified;
  const double factor = config_.study.estimator == Estimator::clusters ? 2 : 1;
  tallies_.broken += std::fabs(std::expm1(lse - dense.lse)) > factor * report.epsilon + 1e-4;
}

void World::check_reports(std::int64_t layer, std::int64_t tokens, const Result& row) {
  const LayerConfig& l = config_.layers[size(layer)];
  const std::int64_t row_bytes =
      (l.key_dim + l.value_dim) * static_cast<std::int64_t>(size_bytes(config_.storage));
  for (const KvHeadReport& report : row.kv) {
    if (report.moved_tokens < 0 || report.moved_tokens > report.fetched_tokens ||
        report.fetched_tokens > tokens || report.resident_tokens > tokens ||
        report.moved_bytes != report.moved_tokens * row_bytes) {
      violated("layer ", layer, ": ", report.fetched_tokens, " fetched, ", report.moved_tokens,
               " moved, ", report.resident_tokens, " resident, ", report.moved_bytes, " bytes, of ",
               tokens, " tokens");
    }
  }
}

void World::truncate() {
  Member& member = any();
  const std::int64_t layer = cached_[random_.below(cached_.size())];
  const std::int64_t held = cache_->tokens(member.id, layer);
  const std::int64_t back =
      static_cast<std::int64_t>(random_.below(random_.below(8) == 0 ? 80 : 6));
  const std::int64_t tokens = std::max<std::int64_t>(0, held - back);
  say(member.name, " to ", tokens);
  std::vector<std::int64_t> compressed(config_.layers.size());
  for (const std::int64_t each : cached_)
    compressed[size(each)] = cache_->compressed_tokens(member.id, each);
  Truncation result;
  if (!attempt([&] { result = cache_->truncate(member.id, tokens); })) return;
  if (!result.done) {
    if (result.layer < 0 || !config_.layers[size(result.layer)].window || tokens == 0 ||
        tokens >= result.least_tokens)
      violated("the CPU goes back wherever it is asked to, but for sliding windows");
    if (member.twin->truncate(tokens)) violated("the twin went back");
    return;
  }
  bool exact = true;
  for (const std::int64_t each : cached_) exact = exact && compressed[size(each)] <= tokens;
  if (result.exact != exact) violated("went back exactly: ", result.exact, ", not ", exact);
  if (!member.twin->truncate(tokens)) violated("the twin did not go back");
  for (DenseLayer& one : member.layers) one.truncate(tokens);
  for (auto& cells : member.cells) cells.resize(std::min(cells.size(), size(tokens)));
}

// Tokens come in every layer, are asked for together, and some or all of them go: the twin gets only
// those that stay.
void World::draft() {
  Member& member = any();
  const std::int64_t tokens = 1 + static_cast<std::int64_t>(random_.below(5));
  const std::int64_t kept = static_cast<std::int64_t>(random_.below(size(tokens) + 1));
  const std::int64_t held = member.layers[size(cached_.front())].tokens();
  for (const std::int64_t layer : cached_) {
    if (member.layers[size(layer)].tokens() != held || may_compress(member, layer, tokens)) return;
  }
  if (!has_room(member, tokens)) return;
  say(member.name, " tokens ", tokens, " of which stay ", kept);
  std::vector<Rows> rows;
  std::vector<Block> queries;
  for (const std::int64_t layer : cached_) {
    rows.push_back(draw_rows(layer, tokens));
    queries.push_back(draw_queries(layer, tokens));
  }
  const std::vector<SequenceId> sequences(size(tokens), member.id);
  const bool asks = random_.below(4) > 0;
  bool done = attempt([&] { cache_->reserve(member.id, tokens); });
  if (!done) return;
  member.twin->reserve(tokens);
  member.reserved = true;
  std::vector<Result> results;
  std::vector<Given> given;
  for (std::size_t i = 0; i < cached_.size(); ++i) given.push_back(give(cached_[i], rows[i]));
  for (std::size_t i = 0; i < cached_.size(); ++i) {
    const LayerConfig& l = config_.layers[size(cached_[i])];
    cache_->append(member.id, cached_[i], given[i].keys, given[i].values);
    Result result;
    result.output.resize(size(tokens * l.query_heads * l.value_dim));
    result.lse.resize(size(tokens * l.query_heads));
    if (asks) {
      cache_->attend(cached_[i],
                     {sequences, queries[i].view(), result.output, result.lse, {}, {}, {}});
      steps_[size(cached_[i])] += tokens;
    }
    results.push_back(std::move(result));
  }
  if (kept < tokens && !cache_->truncate(member.id, held + kept))
    violated("tokens of the window could not be taken back");
  for (std::size_t i = 0; i < cached_.size(); ++i) {
    const std::int64_t layer = cached_[i];
    const LayerConfig& l = config_.layers[size(layer)];
    if (kept == 0) {
      member.ahead[size(layer)] = true;
      continue;
    }
    appended(member, layer, rows[i], given[i], 0, kept);
    if (!asks) continue;
    const Result alone = member.twin->attend(layer, queries[i].part(0, kept));
    results[i].output.resize(size(kept * l.query_heads * l.value_dim));
    results[i].lse.resize(size(kept * l.query_heads));
    if (!same_bits(alone.output, results[i].output) || !same_bits(alone.lse, results[i].lse))
      violated("layer ", layer, ": tokens answer otherwise where others come after them");
  }
}

void World::erase() {
  if (members_.size() < 2) return;
  const std::size_t i = random_.below(members_.size());
  say(members_[i]->name);
  if (!attempt([&] { cache_->erase(members_[i]->id); })) return;
  erased_.push_back(members_[i]->id);
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(i));
}

void World::redraw() {
  Member& member = any();
  const std::uint64_t draw = random_.bits();
  say(member.name);
  if (attempt([&] { cache_->redraw(member.id, draw); })) member.twin->redraw(draw);
}

// The twin of a fork is told all calls anew. What is long is left alone, since that takes as long.
void World::fork() {
  Member& member = any();
  if (members_.size() >= 6 || member.twin->calls() > 120) return;
  auto other = std::make_unique<Member>();
  other->name = "s" + std::to_string(created_);
  other->family = member.family;
  other->layers = member.layers;
  other->ahead = member.ahead;
  other->reserved = member.reserved;
  other->cells = member.cells;
  if (!attempt([&] { other->id = cache_->fork(member.id); })) return;
  ++created_;
  say(member.name, " as ", other->name);
  other->twin = member.twin->told_again();
  members_.push_back(std::move(other));
}

// Rows go to other cells, and what was in theirs is gone, unless a fork has it there.
void World::move() {
  Member& member = any();
  const std::int64_t layer = cached_[random_.below(cached_.size())];
  const std::int64_t held = cache_->tokens(member.id, layer);
  const bool all = random_.below(4) == 0;
  const std::int64_t first = all ? 0 : static_cast<std::int64_t>(random_.below(size(held + 1)));
  const std::int64_t count =
      all ? held : static_cast<std::int64_t>(random_.below(size(held - first + 1)));
  say(member.name, " layer ", layer, " from ", first, " tokens ", count);
  if (engine_.empty()) {
    const Given given = give(layer, draw_rows(layer, 0));
    attempt([&] { cache_->move(member.id, layer, 0, given.keys, given.values); }, true);
    return;
  }
  auto& cells = member.cells[size(layer)];
  const auto placed =
      engine_[size(layer)]->move(std::span(cells).subspan(size(first), size(count)), random_);
  if (random_.below(8) == 0) {
    attempt([&] { cache_->move(member.id, layer, held + 1 - count, placed->keys, placed->values); },
            true);
    return;
  }
  if (!attempt([&] { cache_->move(member.id, layer, first, placed->keys, placed->values); }))
    return;
  std::copy(placed->rows.begin(), placed->rows.end(), cells.begin() + first);
}

// What is restored goes on as another sequence. Writers and readers throw on the way, and bytes are
// damaged; then nothing is restored.
void World::save_and_restore() {
  Member& member = any();
  say(member.name);
  const bool write_throws = random_.below(8) == 0;
  std::int64_t pieces = static_cast<std::int64_t>(random_.below(12));
  std::vector<std::byte> bytes;
  const bool saved = attempt([&] {
    bytes.clear();
    cache_->save(member.id, [&](std::span<const std::byte> piece) {
      if (write_throws && pieces-- == 0) throw Thrown();
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    });
  });
  if (!saved || members_.size() >= 6 || member.twin->calls() > 120 || member.reserved) return;
  const std::size_t fault = random_.below(8);
  if (fault == 0) bytes.resize(random_.below(bytes.size()));
  if (fault == 1) bytes[random_.below(bytes.size())] ^= std::byte{0x10};
  const std::size_t thrown_at = fault == 2 ? random_.below(bytes.size()) : bytes.size();
  const std::size_t longest = 1 + random_.below(random_.below(2) == 0 ? 40 : 4000);
  say("fault ", fault);
  SequenceId id;
  std::size_t at = 0;
  const auto restore = [&] {
    id = cache_->restore([&](std::span<std::byte> to) {
      if (at >= thrown_at && fault == 2) throw Thrown();
      const std::size_t count = std::min({to.size(), longest, bytes.size() - at});
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), count, to.begin());
      at += count;
      return count;
    });
  };
  const std::int64_t before = all_bytes(cache_->memory());
  if (!attempt(restore, fault < 2 || !engine_.empty())) {
    if (all_bytes(cache_->memory()) != before) violated("a failed restore has left something");
    return;
  }
  if (at != bytes.size()) violated("restore took ", at, " of ", bytes.size(), " bytes");
  auto other = std::make_unique<Member>();
  other->id = id;
  other->name = "s" + std::to_string(created_);
  other->family = created_++;
  other->layers = member.layers;
  other->ahead = member.ahead;
  say("as ", other->name);
  other->twin = member.twin->told_again();
  members_.push_back(std::move(other));
}

void World::read() {
  const Member& member = any();
  const std::int64_t layer = cached_[random_.below(cached_.size())];
  const DenseLayer& held = member.layers[size(layer)];
  const std::int64_t window = config_.layers[size(layer)].window.value_or(held.tokens());
  const std::int64_t first = std::max(
      static_cast<std::int64_t>(random_.below(size(held.tokens() + 1))), held.tokens() - window);
  const std::int64_t count =
      static_cast<std::int64_t>(random_.below(size(held.tokens() - first + 1)));
  say(member.name, " layer ", layer, " from ", first, " tokens ", count);
  const Block keys = held.keys().part(first, count);
  const Block values = held.values().part(first, count);
  const std::size_t element = size_bytes(config_.storage);
  std::vector<std::byte> key_bytes(keys.data.size() * element);
  std::vector<std::byte> value_bytes(values.data.size() * element);
  if (!attempt([&] { cache_->read(member.id, layer, first, count, key_bytes, value_bytes); }))
    return;
  const auto check = [&](const std::vector<std::byte>& got, const Block& want) {
    for (std::size_t i = 0; i < want.data.size(); ++i) {
      const float x = with_element(config_.storage, [&](auto value) {
        std::memcpy(&value, got.data() + i * element, element);
        return to_float(value);
      });
      if (x != want.data[i])
        violated("number ", i, " that was read is ", x, ", not ", want.data[i]);
    }
  };
  check(key_bytes, keys);
  check(value_bytes, values);
}

// Calls that must be refused.
void World::misuse() {
  Member& member = any();
  const std::int64_t layer = cached_[random_.below(cached_.size())];
  const LayerConfig& l = config_.layers[size(layer)];
  const SequenceId gone = erased_.empty() || random_.below(2) == 0
                              ? SequenceId{static_cast<std::int64_t>(random_.bits() >> 1)}
                              : erased_[random_.below(erased_.size())];
  Rows rows = draw_rows(layer, 3);
  Block queries = draw_queries(layer, 3);
  const float bad = pick(random_, {kNaN, kInfinity, -kInfinity});
  Result result;
  result.output.resize(size(3 * l.query_heads * l.value_dim));
  std::vector<SequenceId> sequences(3, member.id);
  const auto batch = [&] {
    return AttendBatch{sequences, queries.view(), result.output, {}, {}, {}, {}};
  };
  // Given when they are called, since the cases change the rows.
  const auto refuse_append = [&](SequenceId id) {
    const Given given = give(layer, rows);
    attempt([&] { cache_->append(id, layer, given.keys, given.values); }, true);
  };
  const auto refuse_step = [&] {
    const Given given = give(layer, rows);
    attempt([&] { cache_->step(layer, given.keys, given.values, batch()); }, true);
  };
  const std::size_t kind = random_.below(14);
  say("kind ", kind, " ", member.name, " layer ", layer);
  std::vector<Scores> scores = draw_scores(member);
  std::vector<ImportanceView> importance;
  switch (kind) {
    case 0:
      rows.keys.data[random_.below(rows.keys.data.size())] = bad;
      refuse_append(member.id);
      break;
    case 1:
      rows.values.data[random_.below(rows.values.data.size())] = bad;
      refuse_append(member.id);
      break;
    case 2:
      refuse_append(gone);
      break;
    case 3:
      attempt([&] { cache_->append(member.id, 2, rows.keys.view(), rows.values.view()); }, true);
      break;
    case 4:
      rows.keys.heads = rows.keys.heads == 1 ? 2 : 1;
      rows.keys.data.resize(size(3 * rows.keys.heads * rows.keys.dim));
      attempt([&] { cache_->append(member.id, layer, rows.keys.view(), rows.values.view()); },
              true);
      break;
    case 5:
      // The last row only: those before it must not have come in.
      rows.keys.at(2, 0, 0) = bad;
      refuse_step();
      break;
    case 6:
      queries.at(2, 0, 0) = bad;
      refuse_step();
      break;
    case 7:
      sequences[2] = gone;
      refuse_step();
      break;
    case 8:
      sequences[1] = kNoSequence;
      refuse_step();
      break;
    case 9:
      sequences = {member.id, gone, member.id};
      attempt([&] { cache_->attend(layer, batch()); }, true);
      break;
    case 10:
      result.output.resize(result.output.size() - 1);
      refuse_step();
      break;
    case 11:
      attempt(
          [&] { cache_->truncate(member.id, -1 - static_cast<std::int64_t>(random_.below(9))); },
          true);
      break;
    case 12:
      attempt([&] { cache_->truncate(member.id, most_tokens_ + 1); }, true);
      break;
    default:
      if (l.dense || l.window || scores[size(layer)].data.empty()) {
        attempt([&] { cache_->reserve(member.id, -1); }, true);
        break;
      }
      scores[size(layer)].data.back() = random_.below(2) == 0 ? bad : -1.0f;
      for (const Scores& one : scores) importance.push_back(one.view());
      // keep = 1 reads no score.
      if (config_.keep < 1) attempt([&] { cache_->compress(member.id, importance); }, true);
      break;
  }
}

// What the host tier makes of what the twin reports of a layer.
void World::expect(const Member& member, std::int64_t layer, MemoryReport& report) const {
  const LayerConfig& l = config_.layers[size(layer)];
  const std::int64_t tokens = cache_->tokens(member.id, layer);
  const std::int64_t row = l.kv_heads * (l.key_dim + l.value_dim) *
                           static_cast<std::int64_t>(size_bytes(config_.storage));
  switch (config_.host) {
    case HostTier::own:
      break;
    case HostTier::engine:
      report.engine_bytes += tokens * row;
      report.host_bytes -= tokens * row;
      report.resident_bytes -= (tokens - cache_->compressed_tokens(member.id, layer)) * row;
      report.basis_bytes += 2 * tokens * static_cast<std::int64_t>(sizeof(void*));
      break;
    case HostTier::file:
      if (!l.window) report.host_bytes += ((tokens + 63) / 64 * 64 - tokens) * row;
      break;
  }
}

void World::check_memory() {
  std::int64_t sum = 0;
  std::int64_t shared = 0;
  std::map<int, int> families;
  for (const auto& member : members_) {
    const MemoryReport memory = cache_->memory(member->id);
    const MemoryReport twin = member->twin->memory();
    MemoryReport expected = twin;
    for (const std::int64_t layer : cached_) expect(*member, layer, expected);
    if (memory.resident_bytes != expected.resident_bytes ||
        memory.sketch_bytes != expected.sketch_bytes || memory.host_bytes != expected.host_bytes ||
        memory.engine_bytes != expected.engine_bytes ||
        memory.basis_bytes != expected.basis_bytes ||
        memory.file_bytes < (config_.host == HostTier::file ? expected.host_bytes : 0)) {
      violated(member->name, ": memory differs from that of the sequence alone");
    }
    sum += all_bytes(memory);
    shared += memory.shared_bytes;
    ++families[member->family];
  }
  const MemoryReport all = cache_->memory();
  if (all.fast_held_bytes() != fast_.live ||
      // What is in a file or the engine's is not in memory of the tier.
      (config_.host == HostTier::own ? all.host_held_bytes() : 0) != host_.live) {
    violated("memory: ", all.fast_held_bytes(), " and ", all.host_held_bytes(),
             " bytes on the tiers, but ", fast_.live, " and ", host_.live, " are given");
  }
  // Also meanwhile.
  if (fast_.peak > config_.fast_bytes_limit.value_or(fast_.peak) ||
      host_.peak > config_.host_bytes_limit.value_or(host_.peak)) {
    violated("memory: ", fast_.peak, " and ", host_.peak, " bytes were held, beyond the limits");
  }
  const std::int64_t total = all_bytes(all);
  const bool in_pairs = std::all_of(families.begin(), families.end(),
                                    [](const auto& family) { return family.second <= 2; });
  // Of more than two, nobody says who shares with whom.
  const bool fits =
      in_pairs ? 2 * total == 2 * sum - shared : total >= sum - shared && total <= sum - shared / 2;
  if (!fits) {
    violated("memory: ", total, " bytes, but the sequences have ", sum, ", ", shared,
             " of them shared");
  }
}

void World::check_state() {
  for (const auto& member : members_) {
    for (const std::int64_t layer : cached_) {
      const std::int64_t held = cache_->tokens(member->id, layer);
      if (held != member->layers[size(layer)].tokens())
        violated(member->name, ", layer ", layer, ": ", held, " tokens, not ",
                 member->layers[size(layer)].tokens());
      const std::int64_t compressed = cache_->compressed_tokens(member->id, layer);
      if (compressed != member->twin->compressed_tokens(layer))
        violated(member->name, ", layer ", layer, ": ", compressed, " tokens are compressed, not ",
                 member->twin->compressed_tokens(layer));
      const std::int64_t changed = cache_->changed_row(member->id, layer);
      if (changed >= 0)
        violated(member->name, ", layer ", layer, ": the resident of token ", changed,
                 " is not what the host tier has");
    }
  }
  check_memory();
  for (const std::int64_t layer : cached_) {
    const LayerStatistics s = cache_->statistics(layer);
    if (s.steps != steps_[size(layer)])
      violated("layer ", layer, ": ", s.steps, " steps counted, not ", steps_[size(layer)]);
  }
}

void World::end() {
  text_ = "erase all";
  for (const auto& member : members_) cache_->erase(member->id);
  members_.clear();
  check_state();
}

}  // namespace verkv::test
