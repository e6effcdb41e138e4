# What every target of this project is built with.
function(cadre_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
    CUDA_RUNTIME_LIBRARY Static)
  # Bits are a promise: host code gets no fused multiply-adds that the source does not write; device
  # code names the instruction where it matters (src/formats/ieee.h). Nobody reads the flags of
  # floating-point exceptions; so loops that choose between two results may vectorise, bits kept.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion;-ffp-contract=off;-fno-trapping-math>
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xcompiler=-Wall,-Wextra,-Wno-parentheses,-ffp-contract=off;--expt-relaxed-constexpr>)
  if(CADRE_WERROR)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>)
  endif()
  if(CADRE_SANITIZE)
    # Instrumented code confuses gcc's analysis of what is initialised; other builds keep it.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${CADRE_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer;-Wno-maybe-uninitialized>)
    target_link_options(${target} PUBLIC -fsanitize=${CADRE_SANITIZE})
  endif()
endfunction()

# cadre_exports(TARGET SCRIPT): what TARGET declares is hidden unless it says otherwise, and if it is a
# shared library it exports what the version script says.
function(cadre_exports target script)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
  target_link_options(${target} PRIVATE LINKER:--version-script=${script})
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${script})
endfunction()

# How far to optimise what is compiled more often than it runs. Sanitizers make of short code long code,
# which the optimiser reads two to four times as long.
if(CADRE_SANITIZE)
  set(cadre_cold_level -O0)
else()
  set(cadre_cold_level $<$<CONFIG:Release>:-O1>)
endif()

function(cadre_cold target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${cadre_cold_level}>)
endfunction()

# cadre_cold_sources(TARGET FILE...): the same for some files of this folder.
function(cadre_cold_sources target)
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target}
    PROPERTIES COMPILE_OPTIONS ${cadre_cold_level})
endfunction()

# cadre_precompile_headers(TARGET ARGUMENT...): target_precompile_headers(), in the way in which ccache
# knows which header was precompiled.
function(cadre_precompile_headers target)
  target_precompile_headers(${target} ${ARGN})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endfunction()
