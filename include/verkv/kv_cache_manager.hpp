// The front door: what an engine on the CPU includes, and all that it calls.
//
//   verkv::CacheConfig config;                          // settings.hpp; all else has defaults:
//   config.layers = shapes_of_all_layers;               //   shapes
//   config.storage = verkv::DType::f16;                 //   keys and values in both tiers
//   config.keep = 1.0 / 16;                             //   share of tokens that stays resident
//   config.fetch.risk = 1e-4;                           //   price of moving a token
//   config.fetch.epsilon = 0.3;                         //   certified error of the denominator
//   config.fast_bytes_limit = bytes;                    //   most memory on the fast tier
//
//   auto cache = verkv::make_cpu_cache(config);
//   auto sequence = cache->create_sequence();
//   cache->append(sequence, layer, keys, values);       // prefill, chunked prefill and decode
//   cache->compress(sequence, importance_of_all_layers);
//   cache->attend(layer, batch);                        // verify, fetch what is needed, attend
//
// A call that throws leaves the cache as it was. With HostTier::file calls also throw CapacityError
// (ErrorCode::file_full) where the disk is full, and FileError. Keys are given as the model attends
// to them (after RoPE). Any thread may call; calls to one manager take turns and block until done. With views in a
// device's memory some calls only enqueue, and find bad numbers later: docs/cuda.md. In a child
// process after fork() every call but config() throws InvalidArgument, and the destructor frees
// nothing; the child may make a manager of its own.
#ifndef VERKV_KV_CACHE_MANAGER_HPP
#define VERKV_KV_CACHE_MANAGER_HPP

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <verkv/config.hpp>
#include <verkv/error.hpp>
#include <verkv/reports.hpp>
#include <verkv/settings.hpp>
#include <verkv/view.hpp>

namespace verkv {

struct ManagerAccess;  // the library's own

// The keys and values of many sequences on two tiers. Made by make_cpu_cache or make_cuda_cache.
class VERKV_API KvCacheManager {
 public:
  ~KvCacheManager();
  KvCacheManager(const KvCacheManager&) = delete;
  KvCacheManager& operator=(const KvCacheManager&) = delete;

  const CacheConfig& config() const;
  // Backend and instruction set, e.g. "cpu (AVX3_DL, 2 threads)"; on a device also how the host
  // tier is held now.
  std::string description() const;

  // ---- Sequences

  // An empty sequence. `draw` names its random draws together with CacheConfig::seed: equal
  // (seed, draw) means equal samples. Without `draw` each sequence gets a name of its own.
  // Throws CapacityError where the fast tier has no room for the buffers of steps with it;
  // std::bad_alloc, on a device DeviceError.
  SequenceId create_sequence();
  SequenceId create_sequence(std::uint64_t draw);
  // A sequence that continues as if all calls for `sequence` had been made for it: the same tokens,
  // sample, sketch, scores of the window and draw name (redraw gives another). What the two append,
  // compress, redraw or erase afterwards never shows in the other, and equal calls give equal bits.
  // On the CPU the two share all that they hold but the scores of the window: a fork costs its
  // tables, and each of the two copies at most a page of 64 tokens (of a sketch: 512) of an array when
  // it first adds to it, which then counts against the limits. What is reserved for the sequence is
  // reserved for the fork as well, and there the sequence itself may be short of memory when it first
  // adds to a page that it shares. On a device everything is copied.
  // Throws InvalidArgument if it is unknown; CapacityError where a limit leaves no room for what is
  // copied; std::bad_alloc, on a device DeviceError.
  SequenceId fork(SequenceId sequence);
  // Frees what no fork of the sequence holds too, and what no other sequence needs of the buffers of a
  // step. Throws InvalidArgument if it is unknown.
  void erase(SequenceId sequence);
  // Tokens appended to `layer`, and how many of those have been compressed; the rest is the local
  // window. Throw InvalidArgument on an unknown sequence or a layer that is not cached.
  std::int64_t tokens(SequenceId sequence, std::int64_t layer) const;
  std::int64_t compressed_tokens(SequenceId sequence, std::int64_t layer) const;

  // ---- Tokens

  // Adds tokens to one layer: keys [token][KV head][key_dim], values [token][KV head][value_dim] (an
  // empty view where LayerConfig::value_is_key_prefix), any strides and types, converted to
  // CacheConfig::storage. Zero tokens are fine. The cost does
  // not depend on the number of sequences, except on a device where a chunk goes (below): its step
  // buffers are fitted to the lengths of all sequences.
  // Beyond what `reserve` has made room for, a call begins as `reserve` of its tokens, for its
  // layer: a local window that has outgrown local_tokens + chunk_tokens by then gives up its oldest
  // chunk_tokens, before the new ones come. They are compressed with the root mean square of the
  // attention probability they received as importance. Only sequences that `compress` has been
  // called for do so. Tokens that no step has attended to have no score and share the budget
  // evenly; to give a second prompt its own importance, leave chunk_tokens without a value and call
  // compress.
  // With HostTier::engine nothing is copied: the views must be of CacheConfig::storage, what they show
  // stays where it is (HostTier), and KV heads lie as far apart (head_stride) in all calls for a layer of
  // a sequence.
  // Throws InvalidArgument on a wrong shape or type, and on a number that is not finite or does not
  // fit the storage type; CapacityError on a byte limit; std::bad_alloc, on a device DeviceError,
  // where memory is short.
  void append(SequenceId sequence, std::int64_t layer, const TensorView& keys,
              const TensorView& values);

  // The same for many sequences, all or nothing. Throws InvalidArgument also on a sequence that is
  // unknown or whose rows are not consecutive.
  void append(std::int64_t layer, const AppendBatch& batch);

  // HostTier::engine: tokens [first, first + keys.tokens) of a layer are at these addresses from now on,
  // with the same numbers; what forks know of them stays. The old addresses are not read again. KV heads
  // must lie as far apart as those of the layer's other tokens do, unless all tokens move.
  // Throws InvalidArgument as append does, on tokens that the layer does not have, and where the host
  // tier is the cache's own.
  void move(SequenceId sequence, std::int64_t layer, std::int64_t first, const TensorView& keys,
            const TensorView& values);

  // Makes room for so many more tokens in every cached layer, and compresses what the local windows
  // have outgrown. Until then, appends to the sequence fail neither for memory nor for a byte limit
  // (which counts what is reserved: it is allocated), compress nothing and, on the CPU, allocate nothing:
  // steps one by one and steps together give the same bits. All or nothing. Takes the place of an
  // earlier reservation; 0 tokens: compresses, and gives an earlier one up, as `compress` does: forks
  // and compressions leave no room for it any more. What is allocated stays with the sequence.
  // Throws InvalidArgument on a negative number or an unknown sequence; CapacityError on a limit;
  // std::bad_alloc, on a device DeviceError, where memory is short.
  void reserve(SequenceId sequence, std::int64_t tokens);

  // Goes back to the first `tokens` tokens; layers that hold fewer stay as they are, so that a token
  // which some layers have already got can be taken back.
  // Within the local window (of all tokens, where nothing is compressed) answers and later
  // compressions are then, bit for bit, as if the tokens had never come. Two things stay: a chunk
  // that was compressed before they came, and what tokens of earlier appends had given to the scores
  // of others. Costs little, frees nothing; a reservation still ends where it did, and append of more
  // tokens at once than were reserved may need memory for their scores.
  // Further back the tokens that stay are all compressed, the local window is empty until more
  // come, and the sample is what was drawn of them before, with the same probabilities: what a
  // certificate says holds, and Truncation::exact is false. Costs what it takes to sketch what stays;
  // a reservation of such a layer is gone. Later appends go on compressing, also from 0 tokens on.
  // Not on a device: there Truncation::done is false, and nothing changes.
  // A layer with a sliding window goes back as within the local window: from the most tokens that it
  // had by CacheConfig::window_margin at least, and by all that the last call has appended; or to 0.
  // Where it cannot, Truncation::done is false, and nothing changes.
  // Throws InvalidArgument on an unknown sequence, and on a number that is negative or above the
  // tokens of every layer; CapacityError where what stays does not fit beside what goes;
  // std::bad_alloc.
  Truncation truncate(SequenceId sequence, std::int64_t tokens);

  // Compresses every layer: all tokens but the last local_tokens leave the fast tier, except those
  // drawn.
  // importance: one view per layer of the configuration, scores [KV head][token] of the tokens not
  // yet compressed (all of them the first time), local window included. Layers that are dense, have a
  // sliding window or are not cached are ignored; their views may be empty. Scores need no
  // normalisation: only ratios within a pool matter.
  // prompt_queries: one view per layer, [position][query head][key_dim], after RoPE as in attend;
  // some 64 late positions of the prompt do. A calibrated sketch is made for them at the first
  // compression; later compressions and the exact sketch use none. A layer's view may have 0
  // positions, and all views may be left out: keys and importance alone then shape the sketch,
  // which costs accuracy. A layer with too few tokens for a first compression
  // (CacheConfig::compress_from) stays as it is and uses none either, and the compression of its
  // window during decode knows none.
  // Throws InvalidArgument on a wrong shape or type, on a score that is negative or not finite
  // (naming layer, head and token), and on a query that is used and not finite; CapacityError where
  // the fast tier would hold more than its limit: sketch and sample are made beside the prompt's rows,
  // which go afterwards.
  void compress(SequenceId sequence, std::span<const ImportanceView> importance,
                std::span<const TensorView> prompt_queries = {});

  // compress in slices, so that the calls of others (and of this sequence) come between. Takes copies of
  // the arguments, which are those of compress, and shares the budget out; compresses nothing. Returns
  // the number of KV heads, over all layers, that continue_compress has to do; 0: there is nothing to
  // compress, and layers are as after compress.
  // Throws what compress throws, but for CapacityError.
  std::int64_t begin_compress(SequenceId sequence, std::span<const ImportanceView> importance,
                              std::span<const TensorView> prompt_queries = {});
  // Does up to `heads` more, on up to as many threads, and returns how many are left; 0: all is done, or
  // nothing was begun. A layer is compressed when its last head is done; before, it is as it was. Each is
  // left, bit for bit, as compress would have left it where begin_compress was called. On a device a
  // call does whole layers.
  // In between everything may be called: attend and append for the sequence too, whose new tokens join
  // the window (of a layer that is not done, no chunk is compressed, and queries do not score the
  // window). A fork has the same left to do. What is reserved stays so. truncate to fewer tokens than are
  // to be compressed cancels. compress, begin_compress, redraw and save of the sequence throw
  // InvalidArgument, ErrorCode::being_compressed.
  // All or nothing. Throws InvalidArgument on an unknown sequence and on heads below 1; CapacityError
  // where the fast tier would hold more than its limit; std::bad_alloc, on a device DeviceError.
  std::int64_t continue_compress(SequenceId sequence, std::int64_t heads);
  // Gives up what is left to do: layers that are done stay compressed, others as they are; another
  // compress or begin_compress takes importance of what each has not compressed.
  // Throws InvalidArgument on an unknown sequence.
  void cancel_compress(SequenceId sequence);

  // Attention of one query token per row, over the tokens of the row's sequence in `layer` up to
  // itself:
  //   output = sum_i softmax(logit)_i value_i,   logit_i = scale * q.k_i (soft-capped)
  // where the softmax also has the head's sink logit, if there is one.
  // In a decode step `append` comes first and `attend` second: a token attends to itself. Several
  // rows of one sequence are its last tokens (AttendBatch); each gives what a step of that token
  // alone gives, bit for bit (on a device LSE and output to rounding), where nothing is compressed
  // in between. Attending changes no later answer: what a token's query gives to the scores of the
  // local window replaces what it gave before, and counts from the next append on. A
  // sequence without tokens in the layer has output 0 and LSE -infinity (or the sink), with
  // epsilon 0, and is certified.
  // Allocates nothing, except where the batch has more rows than ever and than 8 for each sequence
  // that has ever been at once: room for what is known of a row grows, and more threads get buffers
  // than the sequences have KV heads. On a device, buffers grow
  // where the batch has more rows than there is room for (CudaOptions::rows).
  // Blocks until outputs and reports are written, except with views in a device's memory.
  // Throws InvalidArgument on a wrong shape or type, an unknown sequence, one whose rows are not
  // consecutive or more than can be asked together, or a query that is not finite where there is no
  // row_status (in a device's memory: a later call throws).
  void attend(std::int64_t layer, const AttendBatch& batch);

  // append of a batch of the same rows, then attend: keys [row][KV head][key_dim], values
  // [row][KV head][value_dim]. A call that throws has done neither, unless a device throws it; where the
  // file of a host tier cannot be read (FileError), it has appended.
  void step(std::int64_t layer, const TensorView& keys, const TensorView& values,
            const AttendBatch& batch);

  // ---- Saving; on the CPU only: elsewhere InvalidArgument, ErrorCode::wrong_backend

  // Hands all of a sequence to `write`, piece by piece: rows, sketch, draws, scores of the local
  // window, but no reserved room. The bytes are those of one machine's byte order, end by themselves
  // and carry checksums. The cache is locked meanwhile: `write` must not call it. What `write` throws
  // comes through.
  // Throws InvalidArgument on an unknown sequence and on an empty function.
  void save(SequenceId sequence, const WriteBytes& write) const;
  // A new sequence, as it was when it was saved: what follows gives the same bits. The configuration
  // must be the same but for limits, threads, executor, allocators, the host tier, window_margin (a
  // larger one holds from the next tokens on), rules of fetching and StudyConfig::order, probability,
  // cap and vector_code. All or nothing, also where `read` throws, which must not call the cache.
  // Throws FormatError, which says what is wrong and where, on bytes that end early, are damaged,
  // are none of a saved sequence, or are of another version or configuration; CapacityError on a
  // byte limit; InvalidArgument on an empty function, and with HostTier::engine, whose sequences a
  // cache with rows of its own restores; std::bad_alloc.
  SequenceId restore(const ReadBytes& read);
  // Copies tokens [first, first + count) of a layer back, as they are stored: keys
  // [token][KV head][key_dim], values [token][KV head][value_dim], dense, of CacheConfig::storage.
  // Either span may be empty; else its size is exact.
  // Throws InvalidArgument on a sequence or layer that is unknown, tokens that the layer does not
  // have or that have left its sliding window, and a size that is not exact.
  void read(SequenceId sequence, std::int64_t layer, std::int64_t first, std::int64_t count,
            std::span<std::byte> keys, std::span<std::byte> values) const;

  // ---- Reports

  // Of all sequences, and of one. The cost of the former does not depend on the number of
  // sequences.
  MemoryReport memory() const;
  MemoryReport memory(SequenceId sequence) const;
  // Of one layer, and of all together. The former throws InvalidArgument on a layer that is not
  // cached.
  LayerStatistics statistics(std::int64_t layer) const;
  LayerStatistics statistics() const;
  void reset_statistics();

  // ---- For studies

  // Draws the sample of every compressed token anew, with the same inclusion probabilities.
  void redraw(SequenceId sequence, std::uint64_t draw);
  // The first compressed token of the layer whose resident is not, byte for byte, the row of the host
  // tier; -1: there is none. Finds rows that an engine has changed without a word (HostTier::engine), as
  // far as they are resident. CPU only: elsewhere InvalidArgument, ErrorCode::wrong_backend.
  std::int64_t changed_row(SequenceId sequence, std::int64_t layer) const;

 private:
  friend struct ManagerAccess;
  struct Impl;
  explicit KvCacheManager(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// A manager whose fast tier is in main memory, as its host tier is unless CacheConfig::host says
// otherwise: the specification, and what runs everywhere.
// Throws InvalidArgument with all of unsupported_reasons(config), if there are any; FileError where the
// file of the host tier cannot be made; CapacityError
// where the system does not give CacheConfig::threads; it names both numbers and leaves no thread.
VERKV_API std::unique_ptr<KvCacheManager> make_cpu_cache(CacheConfig config);

// What a sequence of so many tokens will take in make_cpu_cache(config). Allocates nothing on any tier.
// Throws InvalidArgument as make_cpu_cache does, and on a number of tokens that no sequence has.
VERKV_API SequenceBytes sequence_bytes(const CacheConfig& config, std::int64_t tokens);

}  // namespace verkv

#endif  // VERKV_KV_CACHE_MANAGER_HPP
