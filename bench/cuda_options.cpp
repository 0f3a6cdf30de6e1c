#include "cuda_options.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>

namespace verkv::bench {

const char* const kCudaBenchHelp =
    R"(cuda_bench: a step of the CUDA backend on a GPU against dense attention.

  --json FILE           writes all results to FILE, anew after each size
  --tokens N[,N...]     tokens of a sequence (default 32768,131072)
  --batch N[,N...]      rows of a step (default 1,16)
  --repetitions N       of everything that is timed (default 30)
  --time-limit SECONDS  starts nothing new after so long and says what is left out (default 540)
  --quick               tiny sizes: whether it runs at all
  --table FILE          prints the Markdown table of a JSON file; needs no GPU
  --help

Exit codes: 0 done, 1 a wrong result or an error, 2 bad options, 3 no CUDA device.
)";

namespace {

std::int64_t parse_number(const std::string& option, const std::string& text, std::int64_t least,
                          std::int64_t most) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || value < least || value > most) {
    throw OptionError(option + " " + text + ": a whole number from " + std::to_string(least) +
                      " to " + std::to_string(most) + " is needed");
  }
  return value;
}

// Ascending, each once.
std::vector<std::int64_t> parse_list(const std::string& option, const std::string& text,
                                     std::int64_t least, std::int64_t most) {
  std::vector<std::int64_t> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    values.push_back(parse_number(option, text.substr(begin, end - begin), least, most));
    begin = end + 1;
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& option = arguments[i];
    const auto value = [&]() -> const std::string& {
      if (i + 1 == arguments.size()) throw OptionError(option + " needs a value");
      return arguments[++i];
    };
    if (option == "--help" || option == "-h") {
      options.help = true;
    } else if (option == "--quick") {
      options.quick = true;
    } else if (option == "--json") {
      options.json = value();
    } else if (option == "--table") {
      options.table = value();
    } else if (option == "--tokens") {
      options.tokens = parse_list(option, value(), 256, 1 << 22);
    } else if (option == "--batch") {
      options.batches = parse_list(option, value(), 1, 256);
    } else if (option == "--repetitions") {
      options.repetitions = parse_number(option, value(), 1, 10000);
    } else if (option == "--time-limit") {
      options.time_limit = parse_number(option, value(), 0, 1000000);
    } else {
      throw OptionError(option + ": no such option; --help lists them");
    }
  }
  return options;
}

Plan plan_of(const Options& options) {
  Plan plan;
  if (options.quick) {
    plan.kv_heads = 2;
    plan.tokens = {640};
    plan.batches = {1, 2};
    plan.warm_up = 1;
    plan.repetitions = 1;
    plan.flush_bytes = 64 << 10;
    plan.piece_bytes = 300 << 10;
    plan.short_layers = 2;
    plan.probes = {256 << 10, 128 << 10, 16 << 10, 64 << 10, 4, 1};
  }
  if (!options.tokens.empty()) plan.tokens = options.tokens;
  if (!options.batches.empty()) plan.batches = options.batches;
  if (options.repetitions > 0) plan.repetitions = static_cast<int>(options.repetitions);
  return plan;
}

}  // namespace verkv::bench
