# di_module(NAME sched SOURCES a.cc b.cc DEPS base [PRIVATE_DEPS ...] [TESTS a_test.cc] [TEST_DEPS ...])
#
# Declares one module of src/ as the static library deepinfer_<name>. DEPS are the modules (short
# names) it may use; a module's test executable links nothing but the module and its declared
# dependencies, so that a forbidden dependency fails at link time. PRIVATE_DEPS and TEST_DEPS are
# CMake targets of third-party libraries.
function(di_module)
  cmake_parse_arguments(ARG "" "NAME" "SOURCES;DEPS;PRIVATE_DEPS;TESTS;TEST_DEPS" ${ARGN})
  set(target deepinfer_${ARG_NAME})
  add_library(${target} STATIC ${ARG_SOURCES})
  target_include_directories(${target} PUBLIC ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
  foreach(dep ${ARG_DEPS})
    target_link_libraries(${target} PUBLIC deepinfer_${dep})
  endforeach()
  target_link_libraries(${target} PRIVATE deepinfer_warnings ${ARG_PRIVATE_DEPS})
  if(DI_BUILD_TESTS AND ARG_TESTS)
    di_test(NAME ${ARG_NAME}_test SOURCES ${ARG_TESTS} DEPS ${target} ${ARG_TEST_DEPS})
  endif()
endfunction()

# What every test is compiled with. Debug information takes a fifth of the time, and GoogleTest names the lines.
function(di_test_options target)
  target_compile_definitions(
    ${target} PRIVATE DI_TEST_DATA_DIR="${CMAKE_SOURCE_DIR}/tests/data"
                      DI_SHARED_DIR="${CMAKE_SOURCE_DIR}/../shared"
                      DI_BINARY_DIR="${CMAKE_BINARY_DIR}/bin")
  target_compile_options(
    ${target} PRIVATE $<$<CONFIG:Release>:-g0>
                      $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)  # ccache needs it with a precompiled header
endfunction()

# Most of the time to compile a test goes into the headers of the test libraries. They are compiled once, in the
# target deepinfer_test_headers, an executable because its options must equal those of every test.
function(di_precompile_test_headers target)
  if(NOT DI_PRECOMPILE_TESTS)
    return()
  endif()
  if(NOT TARGET deepinfer_test_headers)
    set(source ${CMAKE_BINARY_DIR}/test_headers.cc)
    file(CONFIGURE OUTPUT ${source} CONTENT "int main() {}\n")
    add_executable(deepinfer_test_headers EXCLUDE_FROM_ALL ${source})
    target_link_libraries(deepinfer_test_headers PRIVATE deepinfer_warnings GTest::gmock GTest::gtest rapidcheck)
    di_test_options(deepinfer_test_headers)
    target_precompile_headers(deepinfer_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h> <rapidcheck/gtest.h>
                              <nlohmann/json.hpp> <filesystem> <fstream> <random>)
  endif()
  target_precompile_headers(${target} REUSE_FROM deepinfer_test_headers)
endfunction()

# di_test(NAME x_test SOURCES ... DEPS targets... [LABELS fast|slow] [TIMEOUT seconds])
#
# One GoogleTest executable. Tests find data through the compile definitions DI_TEST_DATA_DIR (files in the
# repository, tests/data) and DI_SHARED_DIR (optional larger recordings beside the checkout; tests that need
# them skip visibly when they are absent).
function(di_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS fast)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  di_precompile_test_headers(${ARG_NAME})
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} deepinfer_warnings GTest::gmock GTest::gtest
                                            GTest::gtest_main rapidcheck)
  di_test_options(${ARG_NAME})
  gtest_discover_tests(
    ${ARG_NAME} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
