// llama.cpp behind one small class: a model, a context of one sequence, and a callback that sees
// every node of the graph. Only this file and hook.cpp know llama.cpp's interface.
#ifndef VERKV_EXAMPLES_LLAMA_CPP_ENGINE_HPP
#define VERKV_EXAMPLES_LLAMA_CPP_ENGINE_HPP

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <verkv/error.hpp>

struct ggml_tensor;

namespace verkv::llm {

// What the engine cannot do or does not find: a foreign file, a context that is too long, a graph
// that is not as expected.
class EngineError : public Error {
 public:
  using Error::Error;
};

using Token = std::int32_t;

// Sees the nodes of the graph in the order of computation. May throw: the decode that called it
// stops and throws the same.
class NodeListener {
 public:
  virtual ~NodeListener() = default;
  // A batch of `tokens` tokens begins, the first of them at `position`.
  virtual void begin_batch(std::int64_t position, std::int64_t tokens) = 0;
  virtual bool wants(const ggml_tensor& node) = 0;
  // The data of `node` and of its sources are valid now, and what is written to it is what the
  // next nodes read.
  virtual void computed(ggml_tensor& node) = 0;
};

// Logits of token `index` of the call to decode, one number per token of the vocabulary; valid
// during the call only.
using LogitsReader = std::function<void(std::int64_t index, std::span<const float> logits)>;

struct EngineOptions {
  std::string model_path;
  // 0: as many as the model was trained for.
  std::int64_t context_tokens = 0;
  // The number is a wish: as many as the model was trained for where that is less, and enough to
  // tell a sliding window from none.
  bool flexible = false;
  // Tokens computed together.
  std::int64_t batch_tokens = 512;
  // 0: one per hardware thread.
  int threads = 0;
};

class Engine {
 public:
  // Loads the model. Throws EngineError naming the file, or the context length and its limit.
  explicit Engine(const EngineOptions& options);
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  std::string model_name() const;  // as the file calls it
  static std::string version();    // of llama.cpp
  std::int64_t layers() const;
  std::int64_t window_tokens() const;  // of sliding-window layers; 0 where the model has none
  std::int64_t context_tokens() const;
  std::int64_t vocabulary() const;

  // With the model's mark of a beginning if `begin` and the model wants one. `marks`: words such as
  // <|im_start|> are marks and not text.
  std::vector<Token> tokenize(std::string_view text, bool begin, bool marks = false) const;
  std::string piece(Token token) const;  // its bytes; may be part of a character
  bool ends(Token token) const;          // the mark of an end
  // `text` as the turn of a user, by the template in the model's file; empty if it has none.
  std::string chat_prompt(std::string_view text) const;

  // Tokens held, which is also the position of the next one.
  std::int64_t position() const;
  // Appends tokens and computes them in batches. The reader, if any, is called for each token in
  // order; without one only the last token's logits are computed (last_logits). Throws EngineError
  // where the context is full, and what the listener throws.
  void decode(std::span<const Token> tokens, NodeListener* listener, const LogitsReader& reader);
  std::span<const float> last_logits() const;
  // Forgets the tokens from `position` on. Of a model with sliding windows, which overwrite what
  // has left the window, only back to 0 or to where mark() was called last. Throws EngineError
  // otherwise.
  void truncate(std::int64_t position);
  void mark();
  // Forgets all keys and values but goes on at the same position: for a model whose every layer is
  // answered by another cache. What the engine attends to from then on is only what came after;
  // truncate() does not bring anything back.
  void forget();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What llama.cpp logged last as an error, in brackets and with a space before it; empty if nothing.
// Asking forgets it.
std::string last_engine_error();

}  // namespace verkv::llm

#endif  // VERKV_EXAMPLES_LLAMA_CPP_ENGINE_HPP
