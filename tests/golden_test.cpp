// Worked cases in JSON. Every field of "expected" is compared with the stage headers and with the
// reference. VERKV_GOLDEN_DIR names another folder of such files.
//
// A case: logits and importance of n tokens; the first sink_tokens and the last local_tokens are
// always resident and paid from budget_tokens; Eq. 3 shares out the rest of the budget over the
// other tokens. Lists of "expected" other than inclusion run over L = "low", the tokens with r < 1.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <verkv/certificate.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/shrinkage.hpp>

#include "catch.hpp"
#include "reference/reference.hpp"
#include "tolerance.hpp"

namespace {

using nlohmann::json;
using verkv::reference::Indices;
using verkv::reference::Vector;

std::filesystem::path golden_folder() {
  const char* chosen = std::getenv("VERKV_GOLDEN_DIR");
  if (chosen != nullptr && *chosen != '\0') return chosen;
#if defined(VERKV_TEST_GOLDEN_DIR)
  return VERKV_TEST_GOLDEN_DIR;
#else
  return std::filesystem::path(__FILE__).parent_path() / "golden";
#endif
}

bool close(double a, double b) {
  if (a == b) return true;
  if (!std::isfinite(a) || !std::isfinite(b)) return false;
  return std::fabs(a - b) <=
         std::max(verkv::tolerance::kGoldenZero,
                  verkv::tolerance::kFormula * std::max(std::fabs(a), std::fabs(b)));
}

void check_close(const char* what, double actual, double expected) {
  INFO(what << ": " << actual << ", expected " << expected);
  CHECK(close(actual, expected));
}

void check_close(const char* what, const Vector& actual, const Vector& expected) {
  INFO(what);
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    INFO("element " << i << ": " << actual[i] << ", expected " << expected[i]);
    CHECK(close(actual[i], expected[i]));
  }
}

struct Case {
  Vector logits;
  Vector importance;
  double budget = 0;
  std::size_t sink = 0;
  std::size_t local = 0;
  double epsilon = 0;
  double delta = 0;
};

// What both the headers and the reference are asked for.
struct Answer {
  bool has_scale = false;
  double scale_c = 0;
  Vector inclusion;
  Indices low;
  double log_shift = 0;
  double denominator = 0;
  double beta = 0;
  Vector lambda;
  double variance = 0;
  double max_jump = 0;
  double certificate = 0;
  double mse = 0;
  Vector gains;
  Indices order;  // of its own gains
};

// The tokens that Eq. 3 decides on, [first, last), and what is left of the budget for them.
struct Middle {
  std::size_t first = 0;
  std::size_t last = 0;
  double budget = 0;
  Vector tau;
};

Middle middle_of(const Case& c) {
  const std::size_t n = c.logits.size();
  Middle m;
  m.first = std::min(c.sink, n);
  m.last = std::max(m.first, n - std::min(c.local, n));
  m.budget = std::max(0.0, c.budget - static_cast<double>(n - (m.last - m.first)));
  m.tau.assign(c.importance.begin() + static_cast<std::ptrdiff_t>(m.first),
               c.importance.begin() + static_cast<std::ptrdiff_t>(m.last));
  return m;
}

Indices low_of(const Vector& r) {
  Indices low;
  for (std::size_t i = 0; i < r.size(); ++i) {
    if (r[i] < 1) low.push_back(i);
  }
  return low;
}

Vector pick(const Vector& x, const Indices& index) {
  Vector result;
  for (const std::size_t i : index) result.push_back(x[i]);
  return result;
}

Answer from_headers(const Case& c) {
  const std::size_t n = c.logits.size();
  const Middle m = middle_of(c);
  Answer a;
  Vector scratch(m.tau.size());
  const verkv::Inclusion solution = verkv::solve_inclusion<double>(m.tau, m.budget, scratch);
  a.inclusion.assign(n, 1.0);
  for (std::size_t i = m.first; i < m.last; ++i) {
    a.inclusion[i] = solution.probability(c.importance[i]);
  }
  a.has_scale = !solution.uniform && solution.scale > 0 && std::isfinite(solution.scale);
  a.scale_c = solution.scale;
  a.low = low_of(a.inclusion);

  const verkv::reference::Weights s = verkv::reference::weights(c.logits);
  a.log_shift = s.shift;
  a.denominator = s.denominator;
  const Vector w = pick(s.w, a.low);
  Vector rho;
  for (const std::size_t i : a.low) rho.push_back(verkv::odds_from_probability(a.inclusion[i]));

  const double log_term = verkv::log_two_over(c.delta);
  a.beta = verkv::shrinkage_beta<double, double>(w, rho);
  for (std::size_t i = 0; i < w.size(); ++i) {
    a.lambda.push_back(verkv::shrinkage_lambda(w[i], rho[i], a.beta));
  }
  const verkv::TailTerms terms = verkv::tail_terms<double, double>(w, rho, a.beta);
  a.variance = terms.variance;
  a.max_jump = terms.max_jump;
  a.mse = terms.mean_square_error();
  a.certificate = verkv::certificate(terms, a.denominator, log_term);

  a.gains.resize(w.size());
  Vector doubles(verkv::kGainScratchDoubles * (w.size() + 1));
  std::vector<std::uint32_t> indices(w.size());
  verkv::exact_gains(w, rho, a.denominator, log_term, doubles, indices, a.gains);
  verkv::order_by_descending<double>(a.gains, indices);
  a.order.assign(indices.begin(), indices.end());
  return a;
}

Answer from_reference(const Case& c) {
  const Middle m = middle_of(c);
  Answer a;
  const verkv::reference::Inclusion solution = verkv::reference::inclusion(m.tau, m.budget);
  a.inclusion.assign(c.logits.size(), 1.0);
  std::copy(solution.r.begin(), solution.r.end(),
            a.inclusion.begin() + static_cast<std::ptrdiff_t>(m.first));
  a.has_scale = solution.has_scale;
  a.scale_c = solution.c;
  a.low = low_of(a.inclusion);

  const verkv::reference::Weights s = verkv::reference::weights(c.logits);
  a.log_shift = s.shift;
  a.denominator = s.denominator;
  const Vector w = pick(s.w, a.low);
  const Vector r = pick(a.inclusion, a.low);
  const verkv::reference::Terms terms = verkv::reference::terms(w, r);
  a.beta = terms.beta;
  a.lambda = terms.lambda;
  a.variance = terms.variance;
  a.max_jump = terms.max_jump;
  a.mse = verkv::reference::mean_square_error(w, r, terms.lambda);
  a.certificate = verkv::reference::certificate(terms, a.denominator, c.delta);
  a.gains = verkv::reference::gains(w, r, a.denominator, c.delta);
  a.order = verkv::reference::descending(a.gains);
  return a;
}

// k* of an order and the certificate after it, by bisection (headers) and by linear scan
// (reference).
struct Stop {
  std::size_t k = 0;
  double certificate = 0;
};

Stop stop_of_headers(const Case& c, const Answer& a, const Indices& order) {
  const Vector w = pick(verkv::reference::weights(c.logits).w, a.low);
  Vector rho;
  for (const std::size_t i : a.low) rho.push_back(verkv::odds_from_probability(a.inclusion[i]));
  const std::vector<std::uint32_t> short_order(order.begin(), order.end());
  Vector rest_w(w.size());
  Vector rest_rho(w.size());
  const double log_term = verkv::log_two_over(c.delta);
  Stop stop;
  stop.k = verkv::certified_prefix<double>(w, rho, short_order, a.denominator, log_term, c.epsilon,
                                           rest_w, rest_rho);
  const auto tail = static_cast<std::ptrdiff_t>(stop.k);
  const Vector left_w(rest_w.begin() + tail, rest_w.end());
  const Vector left_rho(rest_rho.begin() + tail, rest_rho.end());
  const double beta = verkv::shrinkage_beta<double, double>(left_w, left_rho);
  stop.certificate = verkv::certificate(verkv::tail_terms<double, double>(left_w, left_rho, beta),
                                        a.denominator, log_term);
  return stop;
}

Stop stop_of_reference(const Case& c, const Answer& a, const Indices& order) {
  const Vector w = pick(verkv::reference::weights(c.logits).w, a.low);
  const Vector r = pick(a.inclusion, a.low);
  Stop stop;
  stop.k = verkv::reference::k_star(w, r, order, a.denominator, c.delta, c.epsilon);
  stop.certificate =
      verkv::reference::certificate_after(w, r, order, stop.k, a.denominator, c.delta);
  return stop;
}

template <class StopOf>
void check_answer(const Case& c, const json& expected, const Answer& a, StopOf&& stop_of) {
  const json& scale = expected.at("scale_c");
  if (scale.is_null()) {
    CHECK_FALSE(a.has_scale);
  } else {
    check_close("scale_c", a.scale_c, scale.get<double>());
  }
  check_close("inclusion", a.inclusion, expected.at("inclusion").get<Vector>());
  REQUIRE(a.low == expected.at("low").get<Indices>());
  if (!c.logits.empty()) {  // without tokens any shift serves
    check_close("log_shift", a.log_shift, expected.at("log_shift").get<double>());
  }
  check_close("denominator", a.denominator, expected.at("denominator").get<double>());
  check_close("beta", a.beta, expected.at("beta").get<double>());
  const Vector lambda = expected.at("lambda").get<Vector>();
  REQUIRE(lambda.size() == a.lambda.size());
  const Vector w = pick(verkv::reference::weights(c.logits).w, a.low);
  for (std::size_t i = 0; i < lambda.size(); ++i) {
    // lambda of a token with neither weight nor probability stands for nothing.
    if (w[i] == 0 && a.inclusion[a.low[i]] == 0) continue;
    INFO("lambda " << i << ": " << a.lambda[i] << ", expected " << lambda[i]);
    CHECK(close(a.lambda[i], lambda[i]));
  }
  check_close("variance", a.variance, expected.at("variance").get<double>());
  check_close("max_jump", a.max_jump, expected.at("max_jump").get<double>());
  check_close("certificate", a.certificate, expected.at("certificate").get<double>());
  check_close("mse", a.mse, expected.at("mse").get<double>());
  const Vector gains = expected.at("gains").get<Vector>();
  check_close("gains", a.gains, gains);

  // "order_by_gain" holds token indices; any order of equal gains is right, so what has to agree is
  // the sequence of gains.
  const Indices tokens = expected.at("order_by_gain").get<Indices>();
  REQUIRE(tokens.size() == a.low.size());
  Indices order;
  for (const std::size_t token : tokens) {
    const auto at = std::lower_bound(a.low.begin(), a.low.end(), token);
    REQUIRE(at != a.low.end());
    REQUIRE(*at == token);
    order.push_back(static_cast<std::size_t>(at - a.low.begin()));
  }
  Indices sorted = order;
  std::sort(sorted.begin(), sorted.end());
  REQUIRE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
  check_close("gains along the order", pick(a.gains, a.order), pick(gains, order));

  // On the order of the file k* is one number.
  const std::size_t k_star = expected.at("k_star").get<std::size_t>();
  const double after = expected.at("certificate_after_k_star").get<double>();
  const Stop stop = stop_of(c, a, order);
  CHECK(stop.k == k_star);
  check_close("certificate_after_k_star", stop.certificate, after);

  // On the own order too, unless it differs in tokens whose gains agree to rounding: then k* still
  // has to be the first k that certifies.
  const Stop own = stop_of(c, a, a.order);
  if (own.k != k_star) {
    INFO("k_star " << own.k << " on its own order, expected " << k_star);
    CHECK(a.order != order);
    const Vector r = pick(a.inclusion, a.low);
    const auto left = [&](std::size_t k) {
      return verkv::reference::certificate_after(w, r, a.order, k, a.denominator, c.delta);
    };
    CHECK(left(own.k) <= c.epsilon * (1 + verkv::tolerance::kFormula));
    CHECK((own.k == 0 || left(own.k - 1) >= c.epsilon * (1 - 1e-9)));
  }
}

void check_file(const std::filesystem::path& path) {
  INFO("file " << path.string());
  std::ifstream stream(path);
  REQUIRE(stream.good());
  const json file = json::parse(stream);  // throws, and so fails, where the file is malformed
  const json& input = file.at("input");
  const json& expected = file.at("expected");
  Case c;
  c.logits = input.at("logits").get<Vector>();
  c.importance = input.at("importance").get<Vector>();
  REQUIRE(c.logits.size() == c.importance.size());
  c.budget = input.at("budget_tokens").get<double>();
  c.sink = input.at("sink_tokens").get<std::size_t>();
  c.local = input.at("local_tokens").get<std::size_t>();
  c.epsilon = input.at("epsilon").get<double>();
  c.delta = input.at("delta").get<double>();
  REQUIRE_FALSE(verkv::first_invalid_importance<double>(c.importance));
  {
    INFO("stage headers");
    check_answer(c, expected, from_headers(c), stop_of_headers);
  }
  {
    INFO("reference");
    check_answer(c, expected, from_reference(c), stop_of_reference);
  }
}

TEST_CASE("golden cases", "[golden]") {
  const std::filesystem::path folder = golden_folder();
  INFO("folder " << folder.string());
  REQUIRE(std::filesystem::is_directory(folder));
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  REQUIRE_FALSE(files.empty());
  for (const auto& file : files) {
    SECTION(file.filename().string()) { check_file(file); }
  }
}

}  // namespace
