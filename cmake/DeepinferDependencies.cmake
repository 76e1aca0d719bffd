# Third-party libraries, all of them distribution packages. Each is used inside one module only.

find_package(Threads REQUIRED)
find_path(FMT_INCLUDE_DIR fmt/format-inl.h REQUIRED) # compiled into our own archive by base/fmt_impl.cc
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(simdjson REQUIRED)
find_package(hwy REQUIRED) # headers only: portable vectors of src/ops

if(DI_BUILD_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
  find_package(rapidcheck REQUIRED)
endif()

if(DI_BUILD_BENCH)
  # Debian's dnnl CMake package insists on OpenCL headers; the library and one header are all we need.
  find_path(DNNL_INCLUDE_DIR dnnl.hpp)
  find_library(DNNL_LIBRARY NAMES dnnl)
  if(DNNL_INCLUDE_DIR AND DNNL_LIBRARY)
    add_library(dnnl_cpu INTERFACE)
    target_include_directories(dnnl_cpu SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
    target_link_libraries(dnnl_cpu INTERFACE ${DNNL_LIBRARY})
  endif()
endif()
