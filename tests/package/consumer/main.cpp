#include <cstdio>
#include <string>

#include <verkv/config.hpp>
#include <verkv/philox.hpp>

int main() {
  const std::string version = std::to_string(VERKV_VERSION_MAJOR) + "." +
                              std::to_string(VERKV_VERSION_MINOR) + "." +
                              std::to_string(VERKV_VERSION_PATCH);
  if (version != PACKAGE_VERSION) {
    std::printf("headers %s, package %s\n", version.c_str(), PACKAGE_VERSION);
    return 1;
  }
  std::printf("verkv %s\n", version.c_str());
  return 0;
}
