# Install rules, the CMake package (install tree and build tree) and the pkg-config files.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/verkv)

install(
  DIRECTORY include/verkv
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT core
  FILES_MATCHING
  PATTERN "*.hpp"
  PATTERN "*.h")

# One export set a component: whoever asks for the headers alone needs nothing else on the machine.
install(TARGETS verkv EXPORT verkv-targets)
install(EXPORT verkv-targets NAMESPACE verkv:: DESTINATION ${package_dir} COMPONENT core)
export(EXPORT verkv-targets NAMESPACE verkv:: FILE verkv-targets.cmake)

if(VERKV_BUILD_RUNTIME)
  install(
    TARGETS verkv_runtime
    EXPORT verkv-runtime-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime)
  install(EXPORT verkv-runtime-targets NAMESPACE verkv:: DESTINATION ${package_dir} COMPONENT runtime)
  export(EXPORT verkv-runtime-targets NAMESPACE verkv:: FILE verkv-runtime-targets.cmake)
endif()

if(VERKV_CUDA)
  install(
    TARGETS verkv_cuda
    EXPORT verkv-cuda-targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda)
  install(EXPORT verkv-cuda-targets NAMESPACE verkv:: DESTINATION ${package_dir} COMPONENT cuda)
  export(EXPORT verkv-cuda-targets NAMESPACE verkv:: FILE verkv-cuda-targets.cmake)
endif()

# A static library leaves its own dependencies to whoever links it.
set(runtime_dependencies "")
if(VERKV_BUILD_RUNTIME)
  get_target_property(runtime_type verkv_runtime TYPE)
  if(runtime_type STREQUAL "STATIC_LIBRARY")
    set(runtime_dependencies "hwy Threads")
  endif()
endif()

set(cuda_dependencies "")
if(VERKV_CUDA AND runtime_dependencies)
  set(cuda_dependencies CUDAToolkit)
endif()

configure_package_config_file(cmake/verkv-config.cmake.in verkv-config.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# While the major version is 0 every minor version may break its users.
write_basic_package_version_file(verkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/verkv-config.cmake ${PROJECT_BINARY_DIR}/verkv-config-version.cmake
  DESTINATION ${package_dir}
  COMPONENT core)

# pkg-config finds the prefix from the place of its own file, so the installed tree can be moved.
# How far up the prefix lies depends on the library directory (Debian's has one level more). Absolute
# directories, as some distributions configure them, are kept as they are.
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
  set(pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH pc_up /prefix/${pkgconfig_dir} /prefix)
  string(REGEX REPLACE "/$" "" pc_up "${pc_up}")
  set(pc_prefix "\${pcfiledir}/${pc_up}")
endif()
cmake_path(APPEND pc_libdir "\${prefix}" ${CMAKE_INSTALL_LIBDIR})
cmake_path(APPEND pc_includedir "\${prefix}" ${CMAKE_INSTALL_INCLUDEDIR})

configure_file(cmake/verkv.pc.in verkv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/verkv.pc DESTINATION ${pkgconfig_dir} COMPONENT core)

if(VERKV_BUILD_RUNTIME)
  set(pc_requires "verkv = ${PROJECT_VERSION}")
  set(pc_libs "-L\${libdir} -lverkv_runtime")
  if(runtime_dependencies)
    string(APPEND pc_requires ", libhwy")
    string(APPEND pc_libs " -pthread")
  endif()
  configure_file(cmake/verkv-runtime.pc.in verkv-runtime.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/verkv-runtime.pc DESTINATION ${pkgconfig_dir} COMPONENT runtime)
endif()

if(VERKV_CUDA)
  set(pc_requires "verkv-runtime = ${PROJECT_VERSION}")
  set(pc_libs "-L\${libdir} -lverkv_cuda")
  if(cuda_dependencies)
    # Where the toolkit keeps its libraries is for whoever links to say.
    string(APPEND pc_libs " -lcudart_static -ldl -lrt -pthread")
  endif()
  configure_file(cmake/verkv-cuda.pc.in verkv-cuda.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/verkv-cuda.pc DESTINATION ${pkgconfig_dir} COMPONENT cuda)
endif()
