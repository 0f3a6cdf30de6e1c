#include "evaluate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "../common/statistics.hpp"
#include "cache_decoder.hpp"
#include "distribution.hpp"
#include "generate.hpp"

namespace verkv::llm {

namespace {

using examples::Interval;
using examples::Rate;

const std::set<std::string>& known_methods() {
  static const std::set<std::string> names{"dense",      "dense_offload",   "full_budget", "top_k",
                                           "top_k_gate", "top_k_fetch",     "poisson",     "paper",
                                           "risk",       "risk_and_epsilon"};
  return names;
}

double elapsed(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double finite_or_none(double value) { return std::isfinite(value) ? value : kNone; }

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? kNone : sum / static_cast<double>(values.size());
}

// Steps of one text are alike; blocks of this many are nearly independent.
constexpr std::size_t kBlockSteps = 16;

// Everything that a method did on one text or task.
struct Account {
  std::vector<double> divergences;  // of all draws
  std::vector<double> step_means;   // [prompt][step], over the draws
  std::vector<double> scores;
  std::vector<double> certificates;
  std::vector<DecodeCost> costs;
  Rate agreements;  // "failures" are the agreements counted
  double log_loss = 0;
  double seconds = 0;
};

// What all methods on one text or task share.
struct Reference {
  double log_loss = 0;
  std::int64_t steps = 0;
  std::vector<double> scores;
};

double mean_of(const std::vector<DecodeCost>& costs, double DecodeCost::*member) {
  double sum = 0;
  for (const DecodeCost& cost : costs) sum += cost.*member;
  return costs.empty() ? kNone : sum / static_cast<double>(costs.size());
}

EvalRow describe(const Method& method, const EvalOptions& options, const Engine& engine) {
  EvalRow row;
  row.model = engine.model_name();
  row.context_tokens = options.context_tokens;
  row.method = method.name;
  if (!method.cached) return row;
  row.importance = name(method.score);
  row.sketch = sketch_label(method.config);
  row.keep = method.config.keep;
  if (method.config.fetch.mode == FetchMode::verified) {
    row.epsilon = method.config.fetch.epsilon.value_or(kNone);
    row.risk = method.config.fetch.risk.value_or(kNone);
    row.probability = method.config.study.probability.value_or(kNone);
    if (std::isfinite(row.epsilon)) row.delta = method.config.fetch.delta;
  }
  return row;
}

void add_costs(Account& account, EvalRow& row) {
  if (account.costs.empty()) return;
  row.resident_fraction = mean_of(account.costs, &DecodeCost::resident_fraction);
  row.fetching_share = mean_of(account.costs, &DecodeCost::fetching_share);
  row.moved_fraction = mean_of(account.costs, &DecodeCost::moved_fraction);
  row.moved_tokens = mean_of(account.costs, &DecodeCost::moved_tokens);
  row.moved_bytes = mean_of(account.costs, &DecodeCost::moved_bytes);
  row.read_fraction = mean_of(account.costs, &DecodeCost::read_fraction);
  row.fast_bytes = mean_of(account.costs, &DecodeCost::fast_bytes);
  row.cache_bytes = mean_of(account.costs, &DecodeCost::cache_bytes);
  // Without an epsilon nothing was promised that could be kept.
  if (std::isfinite(row.epsilon)) {
    row.certified_share = mean_of(account.costs, &DecodeCost::certified_share);
  }
  row.certificate_median = finite_or_none(examples::quantile(account.certificates, 0.5));
  row.certificate_p95 = finite_or_none(examples::quantile(account.certificates, 0.95));
}

EvalRow text_row(const Method& method, Account& account, const Reference& reference,
                 const EvalOptions& options, const Engine& engine, const std::string& text,
                 std::int64_t prompts) {
  EvalRow row = describe(method, options, engine);
  row.text = text;
  add_costs(account, row);
  row.kl_mean = mean(account.divergences);
  // Draws of one prompt are no more prompts, and blocks do not run from one prompt into the next.
  std::vector<double> whole_blocks;
  const auto of_prompt = static_cast<std::size_t>(options.steps);
  for (std::size_t first = 0; first < account.step_means.size(); first += of_prompt) {
    const auto begin = account.step_means.begin() + static_cast<std::ptrdiff_t>(first);
    whole_blocks.insert(whole_blocks.end(), begin,
                        begin + static_cast<std::ptrdiff_t>(of_prompt / kBlockSteps * kBlockSteps));
  }
  const Interval interval = examples::mean_interval(whole_blocks, kBlockSteps);
  row.kl_low = std::isnan(interval.low) ? kNone : std::max(0.0, interval.low);
  row.kl_high = interval.high;
  row.kl_median = examples::quantile(account.divergences, 0.5);
  row.kl_p95 = examples::quantile(account.divergences, 0.95);
  row.kl_worst = examples::quantile(account.divergences, 1);
  row.agreement = account.agreements.value();
  const Interval agreement =
      examples::wilson_interval(row.agreement, static_cast<double>(account.step_means.size()));
  row.agreement_low = agreement.low;
  row.agreement_high = agreement.high;
  const double steps = static_cast<double>(account.divergences.size());
  row.perplexity = std::exp(account.log_loss / steps);
  row.perplexity_dense = std::exp(reference.log_loss / static_cast<double>(reference.steps));
  row.samples = static_cast<std::int64_t>(account.divergences.size());
  row.prompts = prompts;
  row.draws = method.random ? options.draws : 1;
  row.seconds = account.seconds;
  return row;
}

EvalRow task_row(const Method& method, Account& account, const Reference& reference,
                 const EvalOptions& options, const Engine& engine, TaskKind task) {
  EvalRow row = describe(method, options, engine);
  row.task = name(task);
  add_costs(account, row);
  row.score = mean(account.scores);
  const double instances = static_cast<double>(account.scores.size());
  const Interval score = examples::wilson_interval(row.score, instances);
  row.score_low = score.low;
  row.score_high = score.high;
  row.score_dense = mean(reference.scores);
  const Interval dense = examples::wilson_interval(row.score_dense, instances);
  row.score_dense_low = dense.low;
  row.score_dense_high = dense.high;
  row.samples = static_cast<std::int64_t>(account.scores.size());
  row.prompts = options.instances;
  row.draws = method.random ? options.draws : 1;
  row.seconds = account.seconds;
  return row;
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
        methods_(select_methods(options)) {
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
      std::ifstream stream(file, std::ios::binary);
      if (!stream || !std::filesystem::is_regular_file(file)) {
        throw EngineError(fmt::format("{}: cannot be read", file));
      }
      const std::string whole((std::istreambuf_iterator<char>(stream)), {});
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

  Prompt read(std::span<const Token> tokens, const std::string& what) {
    const double begin = done_;
    Prompt prompt =
        read_prompt(engine_, hook_, tokens, reading_, [&](std::int64_t done, std::int64_t total) {
          done_ = begin + prompt_work() * static_cast<double>(done) / static_cast<double>(total);
          advance(0, what + ", reading");
        });
    done_ = begin;
    advance(prompt_work(), what);
    return prompt;
  }

  // Afterwards nothing dense can answer in our place, where all layers are ours.
  void leave_dense(const Prompt& prompt) {
    engine_.truncate(static_cast<std::int64_t>(prompt.tokens.size()));
    if (prompt.layers.size() == static_cast<std::size_t>(engine_.layers())) engine_.forget();
  }

  std::uint64_t draw_of(std::int64_t prompt, std::int64_t draw) const {
    return static_cast<std::uint64_t>(prompt) * 1000 + static_cast<std::uint64_t>(draw);
  }

  void text(const std::string& label, const std::function<std::string(std::int64_t)>& source) {
    std::vector<Account> accounts(methods_.size());
    Reference reference;
    for (std::int64_t number = 0; number < options_.prompts; ++number) {
      const std::string what = fmt::format("{} {} of {}", label, number + 1, options_.prompts);
      std::vector<Token> tokens = engine_.tokenize(source(number), true);
      if (static_cast<std::int64_t>(tokens.size()) < needed_tokens() + 1) {
        throw EngineError(fmt::format("{} has {} tokens; {} of context and {} steps need {}", what,
                                      tokens.size(), options_.context_tokens, options_.steps,
                                      needed_tokens() + 1));
      }
      tokens.resize(static_cast<std::size_t>(needed_tokens() + 1));
      const std::span<const Token> all(tokens);
      const auto context = static_cast<std::size_t>(options_.context_tokens);
      const auto steps = all.subspan(context, static_cast<std::size_t>(options_.steps));
      const auto targets = all.subspan(context + 1);
      const Prompt prompt = read(all.first(context), what);

      std::vector<std::vector<float>> dense;
      engine_.decode(steps, nullptr, [&](std::int64_t step, std::span<const float> logits) {
        dense.emplace_back(logits.begin(), logits.end());
        reference.log_loss -= log_probability(logits, targets[static_cast<std::size_t>(step)]);
        ++reference.steps;
      });
      leave_dense(prompt);

      for (std::size_t m = 0; m < methods_.size(); ++m) {
        const Method& method = methods_[m];
        Account& account = accounts[m];
        if (!method.cached) {
          for (const std::vector<float>& row : dense) {
            const std::size_t step = account.divergences.size() % dense.size();
            account.divergences.push_back(0);
            account.step_means.push_back(0);
            account.agreements.add(true);
            account.log_loss -= log_probability(row, targets[step]);
          }
          continue;
        }
        const std::int64_t draws = method.random ? options_.draws : 1;
        const std::size_t before = account.step_means.size();
        account.step_means.resize(before + static_cast<std::size_t>(options_.steps));
        for (std::int64_t draw = 0; draw < draws; ++draw) {
          const auto begin = std::chrono::steady_clock::now();
          CacheDecoder decoder(prompt, options_.backend, method.config, method.score,
                               draw_of(number, draw));
          hook_.decode(engine_, steps, decoder,
                       [&](std::int64_t step, std::span<const float> logits) {
                         const std::vector<float>& truth = dense[static_cast<std::size_t>(step)];
                         const double kl = kl_divergence(truth, logits);
                         account.divergences.push_back(kl);
                         account.step_means[before + static_cast<std::size_t>(step)] +=
                             kl / static_cast<double>(draws);
                         account.agreements.add(largest(truth) == largest(logits));
                         account.log_loss -=
                             log_probability(logits, targets[static_cast<std::size_t>(step)]);
                       });
          finish(decoder, account);
          account.seconds += elapsed(begin);
          engine_.truncate(options_.context_tokens);
          advance(run_work(options_.steps), what + ", " + method.name);
        }
      }
    }
    for (std::size_t m = 0; m < methods_.size(); ++m) {
      rows_.push_back(text_row(methods_[m], accounts[m], reference, options_, engine_, label,
                               options_.prompts));
      offload(methods_[m], rows_.back());
    }
    if (save_) save_(rows_);
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
      const Prompt prompt = read(context, what);
      const auto answer = [&](AttentionVisitor* visitor) {
        std::string text;
        continue_greedily(engine_, hook_, visitor, question, task.max_new_tokens, [&](Token token) {
          text += engine_.piece(token);
          // Every answer is one line.
          return text.find('\n') == std::string::npos;
        });
        return task_score(task, text);
      };
      const double dense = answer(nullptr);
      reference.scores.push_back(dense);
      leave_dense(prompt);
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
          CacheDecoder decoder(prompt, options_.backend, method.config, method.score,
                               draw_of(number, draw));
          score += answer(&decoder) / static_cast<double>(draws);
          finish(decoder, account);
          account.seconds += elapsed(begin);
          engine_.truncate(static_cast<std::int64_t>(context.size()));
          advance(run_work(kTaskSteps), what + ", " + method.name);
        }
        account.scores.push_back(score);
      }
    }
    for (std::size_t m = 0; m < methods_.size(); ++m) {
      rows_.push_back(task_row(methods_[m], accounts[m], reference, options_, engine_, kind));
      offload(methods_[m], rows_.back());
    }
    if (save_) save_(rows_);
  }

  static void finish(const CacheDecoder& decoder, Account& account) {
    account.costs.push_back(decoder.cost());
    const std::vector<double>& certificates = decoder.certificates();
    account.certificates.insert(account.certificates.end(), certificates.begin(),
                                certificates.end());
  }

  // Dense attention over a cache in host memory: everything moves at every step.
  static void offload(const Method& method, EvalRow& row) {
    if (method.name != "dense_offload") return;
    row.resident_fraction = 0;
    row.fetching_share = 1;
    row.moved_fraction = 1;
    row.read_fraction = 1;
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

std::string sketch_label(const CacheConfig& config) {
  const bool used = config.keep < 1 && (config.fetch.mode == FetchMode::verified ||
                                        config.study.select == Selection::poisson);
  if (!used) return {};
  if (config.sketch.kind == SketchKind::exact) return "exact";
  return fmt::format("{} bits", config.sketch.bits);
}

std::vector<Method> select_methods(const EvalOptions& options) {
  for (const std::string& method : options.methods) {
    if (known_methods().count(method) == 0) {
      std::string names;
      for (const std::string& known : known_methods()) names += (names.empty() ? "" : ", ") + known;
      throw InvalidArgument(fmt::format("there is no method {}; there are {}", method, names));
    }
  }
  const auto wanted = [&options](const std::string& method) {
    return options.methods.empty() || options.methods.count(method) > 0;
  };
  CacheConfig base;
  base.seed = options.seed;
  if (options.threads > 0) base.threads = options.threads;
  base.fetch.epsilon.reset();
  base.fetch.risk.reset();

  std::vector<Method> methods;
  const auto add = [&](const std::string& method, const CacheConfig& config, Score score) {
    if (!wanted(method)) return;
    methods.push_back({method, config, score, true, config.study.select == Selection::poisson});
  };
  for (const char* method : {"dense", "dense_offload"}) {
    if (wanted(method)) methods.push_back({method, base, Score::kvzip_mean, false, false});
  }
  CacheConfig full = base;
  full.keep = 1;
  full.fetch.mode = FetchMode::never;
  full.study.select = Selection::topk;
  add("full_budget", full, options.largest_scores.front());

  for (const double keep : options.keeps) {
    CacheConfig kept = base;
    kept.keep = keep;
    for (const Score score : options.largest_scores) {
      CacheConfig config = kept;
      config.study.select = Selection::topk;
      config.fetch.mode = FetchMode::never;
      add("top_k", config, score);
    }
    if (options.gate != nullptr) {
      CacheConfig config = kept;
      config.study.select = Selection::topk;
      config.fetch.mode = FetchMode::never;
      add("top_k_gate", config, Score::gate);
    }
    for (const SketchConfig& sketch : options.sketches) {
      kept.sketch = sketch;
      for (const Score score : options.largest_scores) {
        for (const double probability : options.probabilities) {
          CacheConfig config = kept;
          config.study.select = Selection::topk;
          config.study.probability = probability;
          add("top_k_fetch", config, score);
        }
      }
      for (const Score score : options.sampling_scores) {
        CacheConfig config = kept;
        config.fetch.mode = FetchMode::never;
        add("poisson", config, score);
        config.fetch.mode = FetchMode::verified;
        for (const double epsilon : options.epsilons) {
          config.fetch.epsilon = epsilon;
          add("paper", config, score);
        }
        config.fetch.epsilon.reset();
        for (const double risk : options.risks) {
          config.fetch.risk = risk;
          add("risk", config, score);
        }
        config.fetch.epsilon = FetchConfig{}.epsilon;
        config.fetch.risk = FetchConfig{}.risk;
        add("risk_and_epsilon", config, score);
      }
    }
  }
  if (methods.empty()) {
    throw InvalidArgument("no method is left to evaluate: it needs a score, a gate or a parameter");
  }
  return methods;
}

std::vector<EvalRow> evaluate(Engine& engine, const AttentionHook& hook, const EvalOptions& options,
                              const EvalProgress& progress, const EvalSave& save) {
  return Evaluation(engine, hook, options, progress, save).run();
}

}  // namespace verkv::llm
