// Built only where the packaged Catch2 comes without a library that holds main.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
