// A cache under random operations, beside what must hold: a dense model (dense_model.hpp) and a twin
// (twin.hpp) of every sequence. Everything follows from a seed; each operation draws from numbers of
// its own, so that any of them can be left out and the others still mean the same.
#ifndef VERKV_TESTS_PROPERTY_WORLD_HPP
#define VERKV_TESTS_PROPERTY_WORLD_HPP

#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "property/dense_model.hpp"
#include "property/twin.hpp"
#include "reference/statistics.hpp"
#include "support/engine_cells.hpp"
#include "support/tier_counter.hpp"

namespace verkv::test {

using reference::Random;

// A property that does not hold.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a run came upon, so that a test can ask for it.
struct Tallies {
  std::map<std::string, std::int64_t> done;     // by operation
  std::map<std::string, std::int64_t> refused;  // by operation
  std::int64_t out_of_memory = 0;
  std::int64_t exact_answers = 0;
  std::int64_t estimated_answers = 0;
  // Certified answers of a sample with an exact sketch, and those of them that are further off.
  std::int64_t certified = 0;
  std::int64_t broken = 0;
  std::int64_t chunks = 0;  // calls that compressed a part of a window
};

class World {
 public:
  // trace: where operations are written to before they are done, or null.
  World(std::uint64_t seed, Tallies& tallies, std::ostream* trace = nullptr);

  // One operation, drawn from `seed`, and all checks. Throws Violation.
  void operate(std::uint64_t seed);
  // Erases all sequences and compares the memory in use with that at the start.
  void end();
  std::string configuration() const;
  // Of the last operation: what it was.
  const std::string& last() const { return text_; }

 private:
  // A sequence of the cache, and what is known of it.
  struct Member {
    SequenceId id;
    std::string name;
    int family = 0;  // of forks
    std::vector<DenseLayer> layers;
    std::unique_ptr<Twin> twin;
    // [layer]: the twin has not seen tokens that came and went; until the next append its last
    // query still counts anew, and the cache's does not.
    std::vector<bool> ahead;
    // What was reserved is not saved, and a twin that is told all anew would have it.
    bool reserved = false;
    // [layer]: where the engine has its tokens, if it has them.
    std::vector<std::vector<EngineCells::Row>> cells;
  };
  // Consecutive rows of a batch; member null: padding.
  struct Run {
    Member* member = nullptr;
    std::int64_t rows = 1;
  };
  struct Rows {
    Block keys;
    Block values;
  };
  // What the cache is given of rows: their own memory, or cells of the engine.
  struct Given {
    TensorView keys;
    TensorView values;
    std::unique_ptr<EngineCells::Placed> placed;
  };
  struct Operation {
    const char* name;
    int weight;
    void (World::*run)();
  };
  static const std::vector<Operation> kOperations;

  void create();
  void append();
  void append_batch();
  void reserve();
  void compress();
  void attend();
  void step();
  void truncate();
  void draft();
  void erase();
  void redraw();
  void fork();
  void move();
  void save_and_restore();
  void read();
  void misuse();

  Rows draw_rows(std::int64_t layer, std::int64_t tokens);
  Block draw_queries(std::int64_t layer, std::int64_t rows);
  std::vector<Scores> draw_scores(const Member& member);
  Member& any();
  // Members with rows, each once, and padding. most: rows of a member at a time.
  std::vector<Run> draw_runs(std::int64_t layer, std::int64_t most, bool appends);
  std::vector<std::int64_t> some_layers();
  bool has_room(const Member& member, std::int64_t tokens) const;
  bool may_compress(const Member& member, std::int64_t layer, std::int64_t tokens) const;

  template <class Call>
  bool attempt(Call&& call, bool wrong = false);
  Given give(std::int64_t layer, const Rows& rows, std::span<const SequenceId> sequences = {});
  // The twin and the model get rows [first, first + count) of what the cache got.
  void appended(Member& member, std::int64_t layer, const Rows& rows, const Given& given,
                std::int64_t first, std::int64_t count);
  // Attends (with rows: after an append, as one step) and compares. false: it was refused.
  bool ask(std::int64_t layer, const std::vector<Run>& runs, const Rows* rows);
  void compare(std::int64_t layer, const Run& run, std::int64_t first, const Result& all,
               const Block& queries, bool has_reports);
  void check_answer(std::int64_t layer, const DenseAnswer& dense, std::int64_t tokens,
                    std::int64_t compressed, std::int64_t head, const Result& row);
  void check_reports(std::int64_t layer, std::int64_t tokens, const Result& row);
  void check_state();
  void check_memory();
  void expect(const Member& member, std::int64_t layer, MemoryReport& report) const;
  template <class... Parts>
  void say(const Parts&... parts);
  template <class... Parts>
  [[noreturn]] void violated(const Parts&... parts) const;

  Tallies& tallies_;
  std::ostream* trace_;
  CacheConfig config_;
  std::vector<std::int64_t> cached_;
  std::int64_t most_tokens_ = 0;
  double spread_ = 1;
  std::vector<std::unique_ptr<EngineCells>> engine_;  // [layer], if it has the rows
  std::unique_ptr<TwinCache> twins_;
  // Outlive the cache.
  TierCounter fast_;
  TierCounter host_;
  std::unique_ptr<KvCacheManager> cache_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<SequenceId> erased_;
  std::vector<std::int64_t> steps_;  // [layer]: rows that attended
  Random random_{0};
  std::string name_;
  std::string text_;
  int created_ = 0;
};

}  // namespace verkv::test

#endif  // VERKV_TESTS_PROPERTY_WORLD_HPP
