// What the tests of the CPU device share.
#ifndef VERKV_TESTS_CPU_DEVICE_TEST_SUPPORT_HPP
#define VERKV_TESTS_CPU_DEVICE_TEST_SUPPORT_HPP

#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.hpp"

namespace verkv::cpu_device::test {

inline std::string kept_ptx(const std::string& file) {
  std::ifstream in(VERKV_TEST_KERNEL_DIR "/" + file);
  if (!in) throw std::runtime_error("cannot read " + file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline const std::string& samples_ptx() {
  static const std::string text = kept_ptx("samples.ptx");
  return text;
}

inline std::string module_of(const std::string& entries) {
  return ".version 8.0\n.target sm_80\n.address_size 64\n" + entries;
}

template <typename T>
Address upload(Device& device, const std::vector<T>& values, const std::string& label = "") {
  Address address = 0;
  device.malloc(address, values.size() * sizeof(T), label);
  device.copy(address, Device::address_of(values.data()), values.size() * sizeof(T),
              CopyKind::host_to_device, kLegacyStream, true);
  return address;
}

template <typename T>
Address allocate(Device& device, std::size_t count, const std::string& label = "") {
  Address address = 0;
  device.malloc(address, count * sizeof(T), label);
  return address;
}

template <typename T>
std::vector<T> download(Device& device, Address address, std::size_t count) {
  std::vector<T> values(count);
  device.copy(Device::address_of(values.data()), address, count * sizeof(T),
              CopyKind::device_to_host, kLegacyStream, true);
  return values;
}

inline std::string first_fault(const Device& device) {
  return device.faults().empty() ? "" : device.faults().front().what();
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace verkv::cpu_device::test

#endif  // VERKV_TESTS_CPU_DEVICE_TEST_SUPPORT_HPP
