// The programs' safetensors files: what is written is read, by them and by RecordedCache, and what
// is damaged is refused.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../examples/common/output_file.hpp"
#include "../examples/common/safetensors.hpp"
#include "catch.hpp"
#include "support/safetensors_writer.hpp"

#include <verkv/recorded_cache.hpp>

namespace {

using namespace verkv;
using namespace verkv::examples;
using verkv::test::make_tensor;
using verkv::test::TemporaryFile;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

template <class T>
std::vector<T> ramp(std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<T, Half>) {
      values[i] = to_half(static_cast<float>(i) / 8);
    } else {
      values[i] = static_cast<T>(i) / 8;
    }
  }
  return values;
}

// What the FormatError of a call says; empty where it throws none.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const FormatError& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Loads `bytes` and reads the tensor "w".
void read_w(const TemporaryFile& file, const std::string& bytes) {
  file.write(bytes);
  SafetensorsFile::load(file.path()).floats("w");
}

std::string file_of(const std::string& header, const std::string& data) {
  return test::SafeTensorsFile::join(header, data);
}

}  // namespace

TEST_CASE("floats come back as they were written") {
  const TemporaryFile file("verkv-safetensors");
  const std::vector<float> weight = {1, -2.5f, 3e-30f, 4, 5, 1e30f};
  const std::vector<float> bias = {7};
  write_safetensors(file.path(),
                    {{"a.weight", TensorType::f32, {2, 3}, weight.data()},
                     {"a.bias", TensorType::f32, {1}, bias.data()}},
                    {{"model", "a \"name\"\n\xff"}, {"score", "kvzip"}});
  const SafetensorsFile read = SafetensorsFile::load(file.path());
  CHECK(read.has("a.bias"));
  CHECK_FALSE(read.has("b"));
  CHECK(read.floats("a.weight").shape == std::vector<std::int64_t>{2, 3});
  CHECK(read.floats("a.weight").values == weight);
  CHECK(read.floats("a.bias").values == bias);
  CHECK(read.metadata().at("score") == "kvzip");
  CHECK(contains(read.metadata().at("model"), "a \"name\"\n"));
  const std::string missing = refusal([&] { read.floats("b"); });
  CHECK(contains(missing, file.path()));
  CHECK(contains(missing, "'b'"));
}

TEST_CASE("data begin aligned, and so does every tensor") {
  const TemporaryFile file("verkv-safetensors");
  const std::vector<Half> halves = ramp<Half>(3);
  const std::vector<float> floats = ramp<float>(5);
  const std::vector<std::int64_t> integers = {-1, std::numeric_limits<std::int64_t>::max()};
  for (std::size_t pad = 0; pad < 70; ++pad) {
    write_safetensors(file.path(),
                      {{"halves", TensorType::f16, {3}, halves.data()},
                       {"floats", TensorType::f32, {5}, floats.data()},
                       {"integers", TensorType::i64, {2, 1}, integers.data()}},
                      {{"pad", std::string(pad, 'x')}});
    const std::string bytes = bytes_of(file.path());
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    REQUIRE((8 + length) % 64 == 0);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    CHECK(header["integers"]["dtype"] == "I64");
    CHECK(header["integers"]["data_offsets"] == std::vector<int>{0, 16});
    CHECK(header["floats"]["data_offsets"] == std::vector<int>{16, 36});
    CHECK(header["halves"]["data_offsets"] == std::vector<int>{36, 42});
    REQUIRE(bytes.size() == 8 + length + 42);
    CHECK(std::memcmp(bytes.data() + 8 + length, integers.data(), 16) == 0);
    CHECK(std::memcmp(bytes.data() + 8 + length + 36, halves.data(), 6) == 0);
    CHECK(SafetensorsFile::load(file.path()).floats("floats").values == floats);
    CHECK(contains(refusal([&] { SafetensorsFile::load(file.path()).floats("halves"); }), "'F16'"));
  }
}

TEST_CASE("RecordedCache reads a written recording") {
  constexpr std::int64_t tokens = 5;
  constexpr std::int64_t steps = 2;
  const TemporaryFile file("verkv-safetensors");
  const std::vector<Half> key = ramp<Half>(2 * tokens * 3);
  const std::vector<Half> value = ramp<Half>(2 * tokens * 5);
  const std::vector<float> query = ramp<float>(steps * 4 * 3);
  const std::vector<float> score = ramp<float>(2 * tokens);
  write_safetensors(file.path(),
                    {{"layers.7.key", TensorType::f16, {2, tokens, 3}, key.data()},
                     {"layers.7.value", TensorType::f16, {2, tokens, 5}, value.data()},
                     {"layers.7.query", TensorType::f32, {steps, 4, 3}, query.data()},
                     {"layers.7.new_key", TensorType::f16, {steps, 2, 3}, key.data()},
                     {"layers.7.new_value", TensorType::f16, {steps, 2, 5}, value.data()},
                     {"layers.7.importance.kvzip", TensorType::f32, {2, tokens}, score.data()}},
                    {{"scale", "0.25"}, {"prompt_tokens", "5"}});
  const RecordedCache cache = RecordedCache::load(file.path());
  REQUIRE(cache.layers().size() == 1);
  CHECK(cache.scale() == 0.25);
  CHECK(cache.prompt_tokens() == tokens);
  CHECK(cache.steps() == steps);
  const RecordedLayer& layer = cache.layers()[0];
  CHECK(layer.index == 7);
  CHECK(layer.value_dim == 5);
  const auto* row = static_cast<const Half*>(layer.value.row(3, 1));
  CHECK(row[2].bits == value[(1 * tokens + 3) * 5 + 2].bits);
  CHECK(static_cast<const float*>(layer.query.row(1, 2))[1] == query[(1 * 4 + 2) * 3 + 1]);
  CHECK(layer.importance.at("kvzip").data[tokens + 1] == score[tokens + 1]);
}

TEST_CASE("what cannot be written is refused and leaves nothing behind") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / "verkv-safetensors-refused";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  const std::string path = (folder / "file").string();
  const float x = 1;
  const auto write = [&](std::vector<TensorData> tensors) { write_safetensors(path, tensors, {}); };
  CHECK_THROWS_AS(write({{"w", TensorType::f32, {1}, nullptr}}), InvalidArgument);
  CHECK_THROWS_AS(write({{"w", TensorType::f32, {1, 0}, &x}}), InvalidArgument);
  CHECK_THROWS_AS(write({{"w", TensorType::f32, {-1}, &x}}), InvalidArgument);
  CHECK_THROWS_AS(write({{"w", TensorType::f32, {1ll << 40, 1ll << 40}, &x}}), InvalidArgument);
  CHECK_THROWS_AS(write({{"w", TensorType::f32, {1}, &x}, {"w", TensorType::f32, {1}, &x}}),
                  InvalidArgument);
  const std::string nowhere = (folder / "none" / "file").string();
  CHECK_THROWS_AS(write_safetensors(nowhere, {{"w", TensorType::f32, {1}, &x}}, {}),
                  OutputFileError);
  CHECK(std::filesystem::is_empty(folder));
  write({{"w", TensorType::f32, {}, &x}});
  CHECK(SafetensorsFile::load(path).floats("w").values == std::vector<float>{1});
  write({{"v", TensorType::f32, {1}, &x}});
  CHECK_FALSE(SafetensorsFile::load(path).has("w"));
  std::filesystem::remove_all(folder);
}

TEST_CASE("a truncated file is refused at every length") {
  const TemporaryFile file("verkv-safetensors");
  const std::vector<float> values = ramp<float>(6);
  write_safetensors(file.path(), {{"w", TensorType::f32, {2, 3}, values.data()}},
                    {{"model", "some"}});
  const std::string whole = bytes_of(file.path());
  CHECK_NOTHROW(read_w(file, whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    CHECK_THROWS_AS(read_w(file, whole.substr(0, size)), FormatError);
  }
}

TEST_CASE("random damage of the header loads or is refused") {
  const TemporaryFile file("verkv-safetensors");
  const std::vector<float> values = ramp<float>(6);
  write_safetensors(file.path(), {{"w", TensorType::f32, {2, 3}, values.data()}},
                    {{"model", "some"}});
  const std::string whole = bytes_of(file.path());
  std::uint64_t state = 1;
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = whole;
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::size_t place = static_cast<std::size_t>(state >> 33) % (whole.size() - 24);
    bytes[place] = static_cast<char>(state >> 24);
    try {
      read_w(file, bytes);
    } catch (const FormatError&) {
      ++refused;
    }
  }
  CHECK(refused > 500);
}

TEST_CASE("a damaged file is refused by name and reason") {
  const TemporaryFile file("verkv-safetensors");
  const std::string data(8, '\0');
  const auto header = [](const std::string& type, const std::string& shape,
                         const std::string& offsets) {
    return R"({"w":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}}";
  };
  const std::string good = header("F32", "[2]", "[0,8]");
  const std::string zero(1, '\0');
  CHECK_NOTHROW(read_w(file, file_of(good + "   ", data)));
  const std::vector<std::pair<std::string, std::string>> damaged = {
      {good + zero, "zero byte"},
      {good + zero + "x", "zero byte"},
      {good + zero + good, "zero byte"},
      {zero + good, "zero byte"},
      {"\xef\xbb\xbf" + good, "byte order mark"},
      {"\xff\xfe" + good, "not JSON"},
      {" " + good, "white space"},
      {good + "x", "not JSON"},
      {"[]", "not a JSON object"},
      {"{", "not JSON"},
      {R"({"__metadata__":{"a":1}})", "'a'"},
      {R"({"__metadata__":[]})", "__metadata__"},
      {R"({"w":1})", "not an object"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{}})", "twice"},
      {R"({"a":[[[[[[[[[[[]]]]]]]]]]]})", "nests"},
      {header("F16", "[4]", "[0,8]"), "F32 is needed"},
      {header("Q4", "[4]", "[0,8]"), "F32 is needed"},
      {header("F32", "[2.5]", "[0,8]"), "shape"},
      {header("F32", "[-2]", "[0,8]"), "shape"},
      {header("F32", "[9223372036854775808]", "[0,8]"), "shape"},
      {header("F32", "2", "[0,8]"), "shape"},
      {header("F32", "[4294967296,4294967296]", "[0,8]"), "span"},
      {header("F32", "[3]", "[0,8]"), "span"},
      {header("F32", "[1]", "[8,4]"), "data_offsets"},
      {header("F32", "[2]", "[0,8,8]"), "data_offsets"},
      {header("F32", "[2]", "[4,12]"), "truncated"},
      {R"({"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "'w'"}};
  for (const auto& [text, reason] : damaged) {
    CAPTURE(text);
    const std::string said = refusal([&, &bytes = text] { read_w(file, file_of(bytes, data)); });
    CAPTURE(said);
    CHECK(contains(said, file.path()));
    CHECK(contains(said, reason));
  }
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::string spoilt = data;
    std::memcpy(spoilt.data() + 4, &bad, sizeof bad);
    const std::string said =
        refusal([&] { read_w(file, file_of(header("F32", "[2]", "[0,8]"), spoilt)); });
    CHECK(contains(said, "'w'"));
    CHECK(contains(said, "number 1"));
  }
  CHECK_THROWS_AS(SafetensorsFile::load(file.path() + ".none"), FormatError);
  CHECK_THROWS_AS(SafetensorsFile::load(std::filesystem::temp_directory_path().string()),
                  FormatError);
}
