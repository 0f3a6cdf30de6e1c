#include "saved_bytes.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>

#include <verkv/error.hpp>

namespace verkv {
namespace {

// Of byte b at 8 k bits from the end of eight.
constexpr std::array<std::array<std::uint64_t, 256>, 8> kTables = [] {
  constexpr std::uint64_t kPolynomial = 0xc96c5795d7870f42;
  std::array<std::array<std::uint64_t, 256>, 8> tables{};
  for (std::size_t b = 0; b < 256; ++b) {
    std::uint64_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      const std::uint64_t crc = tables[k - 1][b];
      tables[k][b] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}();

}  // namespace

void Checksum::add(std::span<const std::byte> bytes) noexcept {
  std::uint64_t crc = state_;
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    // Byte by byte, so that the byte order of the machine does not matter.
    for (std::size_t k = 0; k < 8; ++k)
      crc ^= std::to_integer<std::uint64_t>(bytes[i + k]) << 8 * k;
    std::uint64_t next = 0;
    for (std::size_t k = 0; k < 8; ++k) next ^= kTables[7 - k][crc >> 8 * k & 0xff];
    crc = next;
  }
  for (; i < bytes.size(); ++i)
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint64_t>(bytes[i])) & 0xff];
  state_ = crc;
}

void SavedWriter::put_bytes(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  checksum_.add(bytes);
  write_(bytes);
}

void SavedWriter::end() {
  const std::uint64_t sum = checksum_.value();
  checksum_ = {};
  write_(std::as_bytes(std::span(&sum, 1)));
}

void SavedReader::get_bytes(std::span<std::byte> bytes) {
  std::size_t got = 0;
  while (got < bytes.size()) {
    const std::size_t now = read_(bytes.subspan(got));
    if (now == 0) {
      at_ += static_cast<std::int64_t>(got);
      refuse("it ends there");
    }
    if (now > bytes.size() - got) refuse("the reader gave more bytes than it was asked for");
    got += now;
  }
  at_ += static_cast<std::int64_t>(got);
  checksum_.add(bytes);
}

void SavedReader::end() {
  const std::uint64_t expected = checksum_.value();
  const std::uint64_t saved = get<std::uint64_t>();
  checksum_ = {};
  if (saved != expected) refuse("its checksum does not fit: it is damaged");
}

void SavedReader::refuse(std::string_view why) const {
  throw FormatError(fmt::format("saved sequence, {}, byte {}: {}", section_, at_, why));
}

}  // namespace verkv
