#include "engine.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>

namespace verkv::llm {

namespace {

constexpr std::int64_t kWindowProbeTokens = 128;

// llama.cpp explains a failure in its log only; the last error line goes into our exceptions.
class Log {
 public:
  static Log& instance() {
    static Log log;
    return log;
  }

  std::string last_error() {
    const std::lock_guard lock(mutex_);
    std::string text = std::exchange(error_, {});
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
    return text.empty() ? text : " (llama.cpp says: " + text + ")";
  }

 private:
  Log() {
    llama_log_set(
        [](ggml_log_level level, const char* text, void* self) {
          if (level == GGML_LOG_LEVEL_ERROR) static_cast<Log*>(self)->keep(text);
        },
        this);
    llama_backend_init();
  }

  void keep(const char* text) {
    const std::lock_guard lock(mutex_);
    error_ = text;
  }

  std::mutex mutex_;
  std::string error_;
};

struct FreeModel {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
struct FreeContext {
  void operator()(llama_context* context) const { llama_free(context); }
};

}  // namespace

struct Engine::Impl {
  std::unique_ptr<llama_model, FreeModel> model;
  std::unique_ptr<llama_context, FreeContext> context;
  const llama_vocab* vocabulary = nullptr;
  std::string path;
  std::int64_t batch_tokens = 0;
  std::int64_t position = 0;
  std::int64_t marked_position = 0;
  bool forgotten = false;
  std::vector<std::uint8_t> marked_windows;
  NodeListener* listener = nullptr;
  std::exception_ptr failure;

  // No exception may pass through the frames of a C library.
  static bool on_node(ggml_tensor* node, bool ask, void* self) {
    auto* impl = static_cast<Impl*>(self);
    if (impl->listener == nullptr || impl->failure) return !ask;
    try {
      if (ask) return impl->listener->wants(*node);
      impl->listener->computed(*node);
      return true;
    } catch (...) {
      impl->failure = std::current_exception();
      return false;
    }
  }

  void open(const EngineOptions& options) {
    last_engine_error();
    path = options.model_path;
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) {
      throw EngineError(fmt::format("{}: there is no such model file", path));
    }
    llama_model_params model_parameters = llama_model_default_params();
    model_parameters.n_gpu_layers = 0;
    model.reset(llama_model_load_from_file(path.c_str(), model_parameters));
    if (!model) {
      throw EngineError(
          fmt::format("{}: llama.cpp cannot load this model{}", path, last_engine_error()));
    }
    vocabulary = llama_model_get_vocab(model.get());
    if (llama_model_has_encoder(model.get()) || !llama_model_has_decoder(model.get())) {
      throw EngineError(fmt::format("{}: not a decoder-only language model", path));
    }

    const std::int64_t trained = llama_model_n_ctx_train(model.get());
    std::int64_t wanted = options.context_tokens == 0 ? trained : options.context_tokens;
    if (options.flexible) {
      wanted = std::min(trained, std::max<std::int64_t>(
                                     wanted, llama_model_n_swa(model.get()) + kWindowProbeTokens));
    }
    if (wanted > trained) {
      throw EngineError(fmt::format("a context of {} tokens was asked for, {} was trained for {}",
                                    wanted, path, trained));
    }
    batch_tokens = std::min(options.batch_tokens, wanted);
    const int threads = options.threads > 0
                            ? options.threads
                            : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = static_cast<std::uint32_t>(wanted);
    parameters.n_batch = static_cast<std::uint32_t>(batch_tokens);
    parameters.n_ubatch = parameters.n_batch;
    parameters.n_seq_max = 1;
    parameters.n_threads = threads;
    parameters.n_threads_batch = threads;
    // The probabilities are nodes of their own only without it.
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    parameters.type_k = GGML_TYPE_F16;
    parameters.type_v = GGML_TYPE_F16;
    parameters.swa_full = false;
    parameters.cb_eval = on_node;
    parameters.cb_eval_user_data = this;
    context.reset(llama_init_from_model(model.get(), parameters));
    if (!context) {
      throw EngineError(
          fmt::format("{}: no context of {} tokens{}", path, wanted, last_engine_error()));
    }
  }

  void decode_batch(std::span<const Token> tokens, const LogitsReader& reader,
                    std::int64_t first_index) {
    const auto count = static_cast<std::int64_t>(tokens.size());
    llama_batch batch = llama_batch_init(static_cast<std::int32_t>(count), 0, 1);
    batch.n_tokens = static_cast<std::int32_t>(count);
    for (std::int64_t i = 0; i < count; ++i) {
      batch.token[i] = tokens[static_cast<std::size_t>(i)];
      batch.pos[i] = static_cast<llama_pos>(position + i);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = reader != nullptr || i + 1 == count;
    }
    if (listener != nullptr) listener->begin_batch(position, count);
    const int status = llama_decode(context.get(), batch);
    llama_batch_free(batch);
    if (failure || status != 0) {
      llama_memory_seq_rm(llama_get_memory(context.get()), 0, static_cast<llama_pos>(position), -1);
    }
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    if (status != 0) {
      throw EngineError(fmt::format("llama.cpp cannot decode {} tokens at position {}: status {}{}",
                                    count, position, status, last_engine_error()));
    }
    position += count;
    if (!reader) return;
    for (std::int64_t i = 0; i < count; ++i) {
      reader(first_index + i, {llama_get_logits_ith(context.get(), static_cast<std::int32_t>(i)),
                               static_cast<std::size_t>(llama_vocab_n_tokens(vocabulary))});
    }
  }
};

Engine::Engine(const EngineOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->open(options);
}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

std::string Engine::model_name() const {
  const std::filesystem::path stem = std::filesystem::path(impl_->path).stem();
  return stem.extension() == ".f32" ? stem.stem().string() : stem.string();
}

std::string Engine::version() { return std::string("llama.cpp ") + llama_version(); }

std::int64_t Engine::layers() const { return llama_model_n_layer(impl_->model.get()); }

std::int64_t Engine::window_tokens() const {
  return std::max<std::int64_t>(0, llama_model_n_swa(impl_->model.get()));
}

std::int64_t Engine::context_tokens() const { return llama_n_ctx(impl_->context.get()); }

std::int64_t Engine::vocabulary() const { return llama_vocab_n_tokens(impl_->vocabulary); }

std::vector<Token> Engine::tokenize(std::string_view text, bool begin, bool marks) const {
  std::vector<Token> tokens(text.size() + 8);
  std::int32_t count = -1;
  try {
    count = llama_tokenize(impl_->vocabulary, text.data(), static_cast<std::int32_t>(text.size()),
                           tokens.data(), static_cast<std::int32_t>(tokens.size()), begin, marks);
  } catch (const std::exception& error) {
    throw EngineError(fmt::format("a text of {} bytes cannot be split into tokens: {}", text.size(),
                                  error.what()));
  }
  if (count < 0) {
    throw EngineError(fmt::format("a text of {} bytes cannot be split into tokens", text.size()));
  }
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

std::string Engine::piece(Token token) const {
  std::array<char, 256> text{};
  const std::int32_t length = llama_token_to_piece(
      impl_->vocabulary, token, text.data(), static_cast<std::int32_t>(text.size()), 0, false);
  return {text.data(), static_cast<std::size_t>(std::max(0, length))};
}

bool Engine::ends(Token token) const { return llama_vocab_is_eog(impl_->vocabulary, token); }

std::string Engine::chat_prompt(std::string_view text) const {
  const char* form = llama_model_chat_template(impl_->model.get(), nullptr);
  if (form == nullptr) return {};
  const std::string content(text);
  const llama_chat_message message{"user", content.c_str()};
  std::string prompt(content.size() + 4096, '\0');
  const std::int32_t length = llama_chat_apply_template(form, &message, 1, true, prompt.data(),
                                                        static_cast<std::int32_t>(prompt.size()));
  if (length < 0 || static_cast<std::size_t>(length) > prompt.size()) return {};
  prompt.resize(static_cast<std::size_t>(length));
  return prompt;
}

std::int64_t Engine::position() const { return impl_->position; }

void Engine::decode(std::span<const Token> tokens, NodeListener* listener,
                    const LogitsReader& reader) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (impl_->position + count > context_tokens()) {
    throw EngineError(fmt::format("{} tokens at position {} do not fit the context of {} tokens",
                                  count, impl_->position, context_tokens()));
  }
  // Undone also where the listener throws.
  struct Listening {
    Impl& impl;
    ~Listening() { impl.listener = nullptr; }
  } listening{*impl_};
  impl_->listener = listener;
  for (std::int64_t first = 0; first < count; first += impl_->batch_tokens) {
    const std::int64_t size = std::min(impl_->batch_tokens, count - first);
    impl_->decode_batch(
        tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(size)), reader,
        first);
  }
}

std::span<const float> Engine::last_logits() const {
  return {llama_get_logits_ith(impl_->context.get(), -1), static_cast<std::size_t>(vocabulary())};
}

void Engine::truncate(std::int64_t position) {
  llama_context* context = impl_->context.get();
  if (position >= impl_->position) return;
  if (position == 0) {
    llama_memory_clear(llama_get_memory(context), false);
    impl_->position = 0;
    impl_->forgotten = false;
    return;
  }
  if (window_tokens() > 0 && !impl_->forgotten && impl_->marked_position != position) {
    throw EngineError(fmt::format("a model with sliding windows can go back to {} or 0, not to {}",
                                  impl_->marked_position, position));
  }
  if (!llama_memory_seq_rm(llama_get_memory(context), 0, static_cast<llama_pos>(position), -1)) {
    throw EngineError(fmt::format("this model's memory cannot be cut back to {} tokens", position));
  }
  impl_->position = position;
  if (window_tokens() == 0 || impl_->forgotten) return;
  const std::vector<std::uint8_t>& windows = impl_->marked_windows;
  if (llama_state_seq_set_data_ext(context, windows.data(), windows.size(), 0,
                                   LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != windows.size()) {
    throw EngineError(fmt::format("the sliding windows at {} tokens cannot be restored{}", position,
                                  last_engine_error()));
  }
}

void Engine::mark() {
  impl_->marked_position = impl_->position;
  if (window_tokens() == 0) return;
  llama_context* context = impl_->context.get();
  impl_->marked_windows.resize(
      llama_state_seq_get_size_ext(context, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
  impl_->marked_windows.resize(llama_state_seq_get_data_ext(context, impl_->marked_windows.data(),
                                                            impl_->marked_windows.size(), 0,
                                                            LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
}

void Engine::forget() {
  llama_memory_clear(llama_get_memory(impl_->context.get()), true);
  impl_->forgotten = true;
}

std::string last_engine_error() { return Log::instance().last_error(); }

}  // namespace verkv::llm
