#include "evaluate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "../../examples/common/input_file.hpp"
#include "../../examples/llama_cpp/distribution.hpp"
#include "../../examples/llama_cpp/generate.hpp"
#include "account.hpp"
#include "few_bits.hpp"

namespace verkv::lab {

namespace {

using llm::continue_greedily;
using llm::kl_divergence;
using llm::largest;
using llm::log_probability;

double elapsed(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Evaluation {
 public:
  Evaluation(Engine& engine, const AttentionHook& hook, const EvalOptions& options,
             const EvalProgress& progress, const EvalSave& save)
      : engine_(engine),
        hook_(hook),
        options_(options),
        progress_(progress),
        save_(save),
        methods_(select_methods(options.grid, options.seed, options.threads)) {
    for (const Method& method : methods_) {
      if (method.cached) reading_.scores.insert(method.score);
      runs_ += method.cached ? (method.random ? options.draws : 1) : 0;
    }
    reading_.gate = options.gate;
    const std::int64_t scoring = scoring_tokens(engine, options.context_tokens, reading_);
    const bool any_text = !options.texts.empty() || !options.files.empty();
    const std::int64_t room =
        std::max({scoring, any_text ? options.steps : 0, options.tasks.empty() ? 0 : kTaskRoom});
    if (options.context_tokens + room > engine.context_tokens()) {
      throw EngineError(
          fmt::format("{} tokens of context and {} for steps or scoring do not fit "
                      "the engine's context of {} tokens",
                      options.context_tokens, room, engine.context_tokens()));
    }
    // In tokens, weighed by what each costs about; only for the time left.
    const double texts = static_cast<double>(
        static_cast<std::int64_t>(options.texts.size() + options.files.size()) * options.prompts);
    const double tasks =
        static_cast<double>(static_cast<std::int64_t>(options.tasks.size()) * options.instances);
    work_ = texts * (prompt_work() + static_cast<double>(runs_) * run_work(options.steps)) +
            tasks * (prompt_work() + static_cast<double>(runs_) * run_work(kTaskSteps));
  }

  std::vector<EvalRow> run() {
    for (const TextKind kind : options_.texts) {
      text(std::string(name(kind)), [&](std::int64_t prompt) {
        const auto seed = options_.seed + static_cast<std::uint64_t>(prompt);
        return generate_text(kind, seed,
                             static_cast<std::size_t>(needed_tokens()) * kBytesPerToken);
      });
    }
    for (const std::string& file : options_.files) {
      const std::string whole = examples::read_file(file);
      text(file.substr(file.rfind('/') + 1), [&](std::int64_t prompt) {
        const std::size_t part = whole.size() / static_cast<std::size_t>(options_.prompts);
        return whole.substr(static_cast<std::size_t>(prompt) * part);
      });
    }
    for (const TaskKind kind : options_.tasks) task(kind);
    return rows_;
  }

 private:
  static constexpr std::size_t kBytesPerToken = 8;  // more than any of the texts takes
  static constexpr std::int64_t kTaskSteps = 32;
  static constexpr std::int64_t kTaskRoom = 192;  // of question and answer

  std::int64_t needed_tokens() const { return options_.context_tokens + options_.steps; }
  double prompt_work() const { return 2 * static_cast<double>(options_.context_tokens); }
  double run_work(std::int64_t steps) const { return 500 + static_cast<double>(steps) * 6; }

  void advance(double work, const std::string& what) {
    done_ += work;
    if (progress_) progress_(done_ / work_, what);
  }

  ScoredPrompt read(std::span<const Token> tokens, const std::string& what) {
    const double begin = done_;
    ScoredPrompt scored =
        read_prompt(engine_, hook_, tokens, reading_, [&](std::int64_t done, std::int64_t total) {
          done_ = begin + prompt_work() * static_cast<double>(done) / static_cast<double>(total);
          advance(0, what + ", reading");
        });
    done_ = begin;
    advance(prompt_work(), what);
    return scored;
  }

  // Afterwards nothing dense can answer in our place, where all layers are ours.
  void leave_dense(const Prompt& prompt) {
    engine_.truncate(static_cast<std::int64_t>(prompt.tokens.size()));
    if (prompt.layers.size() == static_cast<std::size_t>(engine_.layers())) engine_.forget();
  }

  std::uint64_t draw_of(std::int64_t prompt, std::int64_t draw) const {
    return static_cast<std::uint64_t>(prompt) * 1000 + static_cast<std::uint64_t>(draw);
  }

  // One text, read and continued by the dense model.
  struct DenseText {
    ScoredPrompt scored;
    std::vector<Token> steps;
    std::vector<Token> targets;              // the true next token of each step
    std::vector<std::vector<float>> logits;  // [step][token of the vocabulary]
  };

  DenseText read_text(const std::string& source, const std::string& what) {
    std::vector<Token> tokens = engine_.tokenize(source, true);
    if (static_cast<std::int64_t>(tokens.size()) < needed_tokens() + 1) {
      throw EngineError(fmt::format("{} has {} tokens; {} of context and {} steps need {}", what,
                                    tokens.size(), options_.context_tokens, options_.steps,
                                    needed_tokens() + 1));
    }
    const auto context = tokens.begin() + options_.context_tokens;
    DenseText text;
    text.steps.assign(context, context + options_.steps);
    text.targets.assign(context + 1, context + 1 + options_.steps);
    tokens.resize(static_cast<std::size_t>(options_.context_tokens));
    text.scored = read(tokens, what);
    engine_.decode(text.steps, nullptr, [&text](std::int64_t, std::span<const float> logits) {
      text.logits.emplace_back(logits.begin(), logits.end());
    });
    leave_dense(text.scored.prompt);
    return text;
  }

  void text(const std::string& label, const std::function<std::string(std::int64_t)>& source) {
    std::vector<Account> accounts(methods_.size());
    Reference reference;
    for (std::int64_t number = 0; number < options_.prompts; ++number) {
      const std::string what = fmt::format("{} {} of {}", label, number + 1, options_.prompts);
      const DenseText dense = read_text(source(number), what);
      for (std::size_t step = 0; step < dense.logits.size(); ++step) {
        reference.log_loss -= log_probability(dense.logits[step], dense.targets[step]);
        ++reference.steps;
      }
      for (std::size_t m = 0; m < methods_.size(); ++m) {
        if (methods_[m].cached) {
          run_text(methods_[m], dense, number, what, accounts[m]);
        } else {
          copy_text(dense, accounts[m]);
        }
      }
    }
    for (std::size_t m = 0; m < methods_.size(); ++m) {
      rows_.push_back(text_row(methods_[m], accounts[m], reference, options_, engine_, label));
    }
    if (save_) save_(rows_);
  }

  // The dense model beside itself.
  static void copy_text(const DenseText& dense, Account& account) {
    for (std::size_t step = 0; step < dense.logits.size(); ++step) {
      account.divergences.push_back(0);
      account.step_means.push_back(0);
      account.agreements.add(true);
      account.log_loss -= log_probability(dense.logits[step], dense.targets[step]);
    }
  }

  void run_text(const Method& method, const DenseText& dense, std::int64_t number,
                const std::string& what, Account& account) {
    const std::int64_t draws = method.random ? options_.draws : 1;
    const std::size_t before = account.step_means.size();
    account.step_means.resize(before + dense.steps.size());
    for (std::int64_t draw = 0; draw < draws; ++draw) {
      const auto begin = std::chrono::steady_clock::now();
      CacheDecoder decoder = make_decoder(dense.scored, method, draw_of(number, draw));
      const auto compare = [&](std::int64_t i, std::span<const float> logits) {
        const auto step = static_cast<std::size_t>(i);
        const std::vector<float>& truth = dense.logits[step];
        const double kl = kl_divergence(truth, logits);
        account.divergences.push_back(kl);
        account.step_means[before + step] += kl / static_cast<double>(draws);
        account.agreements.add(largest(truth) == largest(logits));
        account.log_loss -= log_probability(logits, dense.targets[step]);
      };
      hook_.decode(engine_, dense.steps, decoder, compare);
      add_cost(method, dense.scored.prompt, options_.steps, decoder, account);
      account.seconds += elapsed(begin);
      engine_.truncate(options_.context_tokens);
      advance(run_work(options_.steps), what + ", " + method.name);
    }
  }

  CacheDecoder make_decoder(const ScoredPrompt& scored, const Method& method,
                            std::uint64_t draw) const {
    Importance score = scored.scores.at(method.score);
    if (method.exponent != 1) {
      for (std::vector<float>& layer : score)
        for (float& value : layer)
          value = static_cast<float>(std::pow(static_cast<double>(value), method.exponent));
    }
    if (method.bits == 0) return {scored.prompt, score, options_.backend, method.config, draw};
    return {in_few_bits(scored.prompt, method.bits), score, options_.backend, method.config, draw};
  }

  static Prompt in_few_bits(const Prompt& prompt, int bits) {
    Prompt result = prompt;
    for (llm::PromptLayer& layer : result.layers) {
      round_keys(layer.keys, layer.shape.kv_heads * layer.shape.key_dim, bits);
      round_values(layer.values, layer.shape.kv_heads, layer.shape.value_dim, bits);
    }
    return result;
  }

  // What the decoder cost, counted in few bits where the method is.
  static void add_cost(const Method& method, const Prompt& prompt, std::int64_t decoded,
                       const CacheDecoder& decoder, Account& account) {
    account.add_cost(decoder);
    if (method.bits == 0) return;
    const std::int64_t tokens = static_cast<std::int64_t>(prompt.tokens.size());
    // All layers of a model that are ours have one shape.
    const llm::AttentionLayer& shape = prompt.layers.front().shape;
    DecodeCost& cost = account.costs.back();
    cost.fast_bytes = cost.cache_bytes * few_bits_share(shape.key_dim, shape.value_dim, tokens,
                                                        tokens + decoded, method.bits);
  }

  // The score of the answer, by the engine alone without a visitor.
  double answer(const Task& task, std::span<const Token> question, AttentionVisitor* visitor) {
    std::string text;
    const auto listen = [&](Token token) {
      text += engine_.piece(token);
      // Every answer is one line.
      return text.find('\n') == std::string::npos;
    };
    continue_greedily(engine_, hook_, visitor, question, task.max_new_tokens, listen);
    return task_score(task, text);
  }

  void task(TaskKind kind) {
    std::vector<Account> accounts(methods_.size());
    Reference reference;
    for (std::int64_t number = 0; number < options_.instances; ++number) {
      const std::string what =
          fmt::format("{} {} of {}", name(kind), number + 1, options_.instances);
      const auto [task, context] =
          fitting_task(kind, options_.seed + static_cast<std::uint64_t>(number));
      const std::vector<Token> question = engine_.tokenize(task.question, false);
      const ScoredPrompt scored = read(context, what);
      const double dense = answer(task, question, nullptr);
      reference.scores.push_back(dense);
      leave_dense(scored.prompt);
      for (std::size_t m = 0; m < methods_.size(); ++m) {
        const Method& method = methods_[m];
        Account& account = accounts[m];
        if (!method.cached) {
          account.scores.push_back(dense);
          continue;
        }
        // Draws of one instance are no more instances: they count as one, with their mean.
        double score = 0;
        const std::int64_t draws = method.random ? options_.draws : 1;
        for (std::int64_t draw = 0; draw < draws; ++draw) {
          const auto begin = std::chrono::steady_clock::now();
          CacheDecoder decoder = make_decoder(scored, method, draw_of(number, draw));
          score += answer(task, question, &decoder) / static_cast<double>(draws);
          add_cost(method, scored.prompt, 0, decoder, account);
          account.seconds += elapsed(begin);
          engine_.truncate(static_cast<std::int64_t>(context.size()));
          advance(run_work(kTaskSteps), what + ", " + method.name);
        }
        account.scores.push_back(score);
      }
    }
    for (std::size_t m = 0; m < methods_.size(); ++m) {
      rows_.push_back(task_row(methods_[m], accounts[m], reference, options_, engine_, kind));
    }
    if (save_) save_(rows_);
  }

  // The longest instance of at most context_tokens tokens.
  std::pair<Task, std::vector<Token>> fitting_task(TaskKind kind, std::uint64_t seed) const {
    const auto limit = static_cast<std::size_t>(options_.context_tokens);
    const std::size_t least = minimum_context_bytes(kind);
    std::size_t bytes = std::clamp(limit * 4, least, kMaxContextBytes);
    for (int round = 0;; ++round) {
      Task task = generate_task(kind, seed, bytes);
      std::vector<Token> context = engine_.tokenize(task.context, true);
      const bool fits = context.size() <= limit;
      if (fits &&
          (round >= 3 || context.size() + limit / 20 >= limit || bytes == kMaxContextBytes)) {
        return {std::move(task), std::move(context)};
      }
      if (!fits && bytes == least) {
        throw EngineError(fmt::format("a task {} takes at least {} tokens of context, not {}",
                                      name(kind), context.size(), limit));
      }
      // A little less than what should fit, so that it comes from below.
      const double scale = 0.98 * static_cast<double>(limit) / static_cast<double>(context.size());
      bytes = std::clamp(static_cast<std::size_t>(static_cast<double>(bytes) * scale), least,
                         kMaxContextBytes);
    }
  }

  Engine& engine_;
  const AttentionHook& hook_;
  const EvalOptions& options_;
  const EvalProgress& progress_;
  const EvalSave& save_;
  std::vector<Method> methods_;
  PromptOptions reading_;
  std::int64_t runs_ = 0;
  double work_ = 1;
  double done_ = 0;
  std::vector<EvalRow> rows_;
};

}  // namespace

std::vector<EvalRow> evaluate(Engine& engine, const AttentionHook& hook, const EvalOptions& options,
                              const EvalProgress& progress, const EvalSave& save) {
  return Evaluation(engine, hook, options, progress, save).run();
}

}  // namespace verkv::lab
