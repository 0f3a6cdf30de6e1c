// Decode rows of long sequences, answered by the library's cache: it reads the engine's rows where they
// lie, and keeps a sketch, a sample and a few bytes a token of its own.
#ifndef VERKV_SRC_GGML_COMPRESSED_HPP
#define VERKV_SRC_GGML_COMPRESSED_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <verkv/kv_cache_manager.hpp>

#include "dense.hpp"
#include "layers.hpp"
#include "log.hpp"
#include "masks.hpp"
#include "nodes.hpp"
#include "report.hpp"
#include "sequences.hpp"
#include "settings.hpp"
#include "stock.hpp"
#include "watch.hpp"

namespace verkv_ggml {

// Of one KV cache of the engine: the tensors of one buffer.
class Compressed final : public BufferListener {
 public:
  // What all caches of a context share.
  struct Shared {
    const Settings& settings;
    Stock& stock;
    Dense& dense;
    Report& report;
    Once& once;
  };

  Compressed(const Shared& shared, const CacheTensor& tensor);
  ~Compressed() override;
  Compressed(const Compressed&) = delete;
  Compressed& operator=(const Compressed&) = delete;

  // The buffer has been freed.
  bool is_gone() const { return is_gone_; }

  // Before a node that writes to a tensor of the cache is computed.
  void note_write(const ggml_tensor* node, const CacheTensor& tensor);
  // Rows of a prompt, which ggml answers.
  void note_prompt(const Attention& attention);
  // Answers rows of sequences that are or become compressed. Returns which, by [stream][row].
  std::vector<bool> answer(const Attention& attention, const Visible& visible);

  // After an exception: forgets all sequences.
  void give_up();

  void written(const ggml_tensor* tensor, std::size_t offset, std::size_t size) override;
  void written_all(ggml_backend_buffer_t buffer) override;
  void freed(ggml_backend_buffer_t buffer) override;

 private:
  // A row's sequence, and how many of its cells there are with the row's own; null: none.
  struct Place {
    Sequence* sequence = nullptr;
    std::int64_t end = 0;
  };
  // Where the rows of a mask belong: one for all layers of a step.
  struct Decision {
    std::uint64_t mask = 0;
    std::uint64_t epoch = 0;
    std::vector<Place> places;
  };

  // ---- Layers ----
  Layer& learn(const Attention& attention);
  Layer* find(const ggml_tensor* root);
  void keep_queries(const Attention& attention, Layer& layer, const std::vector<bool>& is_answered);
  bool is_served(const Layer& layer) const;
  std::int64_t index_of(const Layer& layer) const;

  // ---- What is dropped ----
  void hear(const ggml_tensor* node, const CacheTensor& tensor);
  void drop_row(const Layer& layer, std::int64_t stream, std::uint32_t cell);
  void drop_rows(const Layer& layer, const RowRange& rows);
  void shorten(std::list<Sequence>::iterator sequence, std::int64_t tokens);
  void erase(std::list<Sequence>::iterator sequence);
  void erase_all();
  void count();

  // ---- Where rows belong ----
  const Decision& decide(const Layer& layer, const Visible& visible);
  Place place(const Layer& layer, std::int64_t stream, std::span<const std::uint32_t> visible,
              std::uint32_t own);
  Sequence* branch(const Match& match);
  Sequence* begin(const Layer& layer, std::int64_t stream, std::vector<std::uint32_t> cells);
  bool is_own(std::int64_t stream, std::uint32_t cell) const;
  void leave_room();
  bool make_manager();
  void compress(Sequence& sequence);
  std::vector<float> scores(Layer& layer, const Sequence& sequence, LateQueries::Found& out_found);

  // ---- Rows and answers ----
  void append(const Layer& layer, Sequence& sequence, std::int64_t end);
  void bring_up(const Layer& layer, std::vector<std::pair<std::int64_t, Place>>& rows);
  void attend(const Attention& attention, const Layer& layer,
              const std::vector<std::pair<std::int64_t, Place>>& rows,
              std::vector<bool>& out_answered);
  void check(const Layer& layer, const Sequence& sequence);

  Shared shared_;
  // Names the cache; its root tensors lie in it.
  ggml_backend_buffer_t buffer_;
  std::int64_t cells_;
  std::int64_t streams_;
  std::mutex mutex_;
  bool is_gone_ = false;
  std::list<Layer> layers_;
  // Of the first so many layers.
  std::unique_ptr<verkv::KvCacheManager> manager_;
  std::int64_t served_ = 0;
  std::list<Sequence> sequences_;
  // Of each tensor of keys: what was written last, in the order of the tokens.
  std::map<const ggml_tensor*, std::vector<Row>> written_;
  // Of [row]: when it was written last, as a number that rises. By the writes to one tensor of keys:
  // all layers are written in a step, one after the other.
  std::vector<std::uint64_t> time_;
  const ggml_tensor* clock_tensor_ = nullptr;
  std::uint64_t clock_ = 0;
  // Rises whenever a decision may be wrong from then on.
  std::uint64_t epoch_ = 0;
  std::uint64_t step_ = 0;
  std::vector<Decision> decisions_;
  // Of the step that is being decided.
  std::vector<Row> own_;
  // Decode rows to be answered exactly before another sequence is begun: of masks that no sequence
  // outlives, such as windows, each step would begin one.
  std::int64_t patience_ = 0;
  std::int64_t last_patience_ = 0;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_COMPRESSED_HPP
