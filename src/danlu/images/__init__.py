"""Classifiers of images in a stage: how idx files become images, and how LeNet-5 learns and is written."""
