#include "support/comparison.hpp"

#include <algorithm>
#include <sstream>

#include "catch.hpp"

namespace verkv::test {

double norm(const Vector& x) {
  double square = 0;
  for (const double v : x) square += v * v;
  return std::sqrt(square);
}

void compare(const CacheConfig& config, std::int64_t layer, const Result& result, std::size_t row,
             const std::vector<reference::StepAnswer>& answers, const std::string& what,
             Tally& tally, const Tolerance& within) {
  const LayerConfig& shape = config.layers[size(layer)];
  const std::size_t group = size(shape.query_heads / shape.kv_heads);
  for (std::size_t h = 0; h < answers.size(); ++h) {
    const reference::StepAnswer& answer = answers[h];
    const KvHeadReport& kv = result.kv[row * size(shape.kv_heads) + h];
    const std::int64_t row_bytes = (shape.key_dim + shape.value_dim) *
                                   static_cast<std::int64_t>(verkv::size_bytes(config.storage));
    std::ostringstream place;
    place << what << ", layer " << layer << ", row " << row << ", KV head " << h << ": ";
    if (kv.resident_tokens != static_cast<std::int64_t>(answer.residents)) {
      tally.fail(place.str() + "residents " + std::to_string(kv.resident_tokens) + ", expected " +
                 std::to_string(answer.residents));
    }
    if (kv.moved_bytes != kv.moved_tokens * row_bytes) tally.fail(place.str() + "moved bytes");
    bool equal_plans = true;
    for (std::size_t g = 0; g < group; ++g) {
      const std::size_t at = row * size(shape.query_heads) + h * group + g;
      const std::int64_t planned = result.query[at].planned_tokens;
      const std::int64_t expected = static_cast<std::int64_t>(answer.query[g].planned);
      ++tally.heads;
      if (planned == expected) continue;
      equal_plans = false;
      ++tally.boundary;
      if (std::abs(planned - expected) > 1) {
        tally.fail(place.str() + "planned " + std::to_string(planned) + ", expected " +
                   std::to_string(expected));
      }
    }
    if (!equal_plans) continue;
    if (kv.fetched_tokens != static_cast<std::int64_t>(answer.fetched.size()) ||
        kv.moved_tokens != static_cast<std::int64_t>(answer.moved.size()) ||
        kv.limited != answer.limited) {
      std::ostringstream text;
      text << place.str() << "fetched " << kv.fetched_tokens << " moved " << kv.moved_tokens
           << " limited " << kv.limited << ", expected " << answer.fetched.size() << " "
           << answer.moved.size() << " " << answer.limited;
      tally.fail(text.str());
      continue;
    }
    for (std::size_t g = 0; g < group; ++g) {
      const std::size_t at = row * size(shape.query_heads) + h * group + g;
      const reference::QueryAnswer& query = answer.query[g];
      std::ostringstream text;
      text << place.str() << "query head " << g << ", planned " << query.planned << ", ";
      const double epsilon = result.query[at].epsilon;
      if (epsilon != query.epsilon &&
          !(std::fabs(epsilon - query.epsilon) <=
            within.epsilon * query.epsilon + tolerance::kSmallestEpsilon)) {
        text << "epsilon " << epsilon << ", expected " << query.epsilon;
        tally.fail(text.str());
      }
      const bool certified = config.fetch.epsilon.has_value() && epsilon <= *config.fetch.epsilon;
      if (result.query[at].certified != certified) {
        tally.fail(text.str() + "certified at " + std::to_string(epsilon));
      }
      const double error = result.query[at].output_error;
      if (error != query.output_error && !(std::fabs(error - query.output_error) <=
                                           tolerance::kStepOutputError * query.output_error +
                                               within.output * tolerance::kStepOutputFloor)) {
        text << "output error " << error << ", expected " << query.output_error;
        tally.fail(text.str());
      }
      const double lse = static_cast<double>(result.lse[at]);
      const bool empty = query.lse == -kInfinite;
      if (empty ? lse != -kInfinite
                : !(std::fabs(lse - query.lse) <=
                    within.lse + tolerance::kStepLseShare * std::fabs(query.lse))) {
        tally.fail(text.str() + "LSE " + std::to_string(lse) + ", expected " +
                   std::to_string(query.lse));
      }
      Vector difference;
      double largest = 0;
      for (std::size_t j = 0; j < query.output.size(); ++j) {
        const double x = static_cast<double>(result.output[at * query.output.size() + j]);
        difference.push_back(x - query.output[j]);
        largest = std::max(largest, std::fabs(query.output[j]));
      }
      if (!(norm(difference) <=
            within.output * (norm(query.output) + tolerance::kStepOutputFloor))) {
        tally.fail(text.str() + "output off by " + std::to_string(norm(difference)) + " of " +
                   std::to_string(norm(query.output)));
      }
    }
  }
}

void report(const Tally& tally) {
  std::string all;
  for (const std::string& text : tally.failures) all += text + "\n";
  INFO(all);
  CHECK(tally.failures.empty());
}

}  // namespace verkv::test
