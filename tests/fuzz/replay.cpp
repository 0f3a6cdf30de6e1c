// A fuzz target as a test: all files of a corpus, and as many mutations of them as asked for, always
// the same.
//   NAME_fuzz_replay CORPUS MUTATIONS
#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"
#include "reference/statistics.hpp"

namespace {

using verkv::reference::Random;
using Bytes = std::vector<std::uint8_t>;

// What runs now, for the signal's message.
const char* running_file = "";
long running_mutation = -1;

extern "C" void say_where(int signal) {
  std::fprintf(stderr, "signal %d in %s, mutation %ld (-1: the file itself)\n", signal,
               running_file, running_mutation);
  std::_Exit(1);
}

Bytes mutated(Random& random, Bytes bytes, const Bytes& other) {
  for (std::size_t n = 1 + random.below(6); n > 0; --n) {
    const std::size_t at = random.below(bytes.size() + 1);
    const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const std::size_t left = bytes.size() - at;
    switch (random.below(7)) {
      case 0:
        if (left > 0) *from ^= static_cast<std::uint8_t>(1u << random.below(8));
        break;
      case 1:
        if (left > 0) *from = static_cast<std::uint8_t>(random.below(256));
        break;
      case 2:
        bytes.insert(from, static_cast<std::uint8_t>(random.below(256)));
        break;
      case 3:
        bytes.erase(from, from + static_cast<std::ptrdiff_t>(std::min(left, random.below(9))));
        break;
      case 4:
        if (random.below(4) == 0) bytes.resize(at);
        break;
      case 5: {
        // A part of the other.
        const std::size_t begin = random.below(other.size() + 1);
        const std::size_t count = std::min(other.size() - begin, random.below(17));
        bytes.insert(from, other.begin() + static_cast<std::ptrdiff_t>(begin),
                     other.begin() + static_cast<std::ptrdiff_t>(begin + count));
        break;
      }
      default: {
        // Digits, which texts are full of.
        if (left > 0) *from = static_cast<std::uint8_t>("0123456789-[]{},:\"."[random.below(19)]);
        break;
      }
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s CORPUS MUTATIONS\n", argv[0]);
    return 2;
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGILL})
    std::signal(signal, say_where);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1]))
    names.push_back(entry.path().string());
  std::sort(names.begin(), names.end());
  if (names.empty()) {
    std::fprintf(stderr, "%s has no files\n", argv[1]);
    return 2;
  }
  std::vector<Bytes> corpus;
  for (const std::string& name : names) {
    std::ifstream file(name, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  for (std::size_t i = 0; i < corpus.size(); ++i) {
    running_file = names[i].c_str();
    running_mutation = -1;
    LLVMFuzzerTestOneInput(corpus[i].data(), corpus[i].size());
  }
  Random random(1);
  const long mutations = std::atol(argv[2]);
  for (long n = 0; n < mutations; ++n) {
    const std::size_t i = static_cast<std::size_t>(n) % corpus.size();
    running_file = names[i].c_str();
    running_mutation = n;
    const Bytes input = mutated(random, corpus[i], corpus[random.below(corpus.size())]);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu files, %ld mutations\n", corpus.size(), mutations);
  return 0;
}
